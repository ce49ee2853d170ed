"""What importing does to an interpreter that has imported nothing but torch: one such process, forked for each question."""

import json
import subprocess
import sys

import pytest

# torch takes seconds to import; everything else is imported by the children
PARENT = """
import json, os, sys, torch, traceback
own = [name for name in sys.modules if name.split(".")[0] in ("nalaformer", "timm", "transformers", "typer", "rich")]
assert not own, own
answers = {}
for name, program in json.loads(sys.stdin.read()).items():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        try:
            exec(program, {})
        except BaseException:
            print(traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answers[name] = file.read().strip()
    os.waitpid(child, 0)
print(json.dumps(answers))
"""

REGISTERED = (
    "import nalaformer.models.language, nalaformer.models.hybrid; from transformers import AutoConfig, AutoModelForCausalLM; "
    "kinds = (type(AutoConfig.for_model(name)) for name in ('nala', 'nala_hybrid')); "
    "print(*(AutoModelForCausalLM._model_mapping[kind].__name__ for kind in kinds))"
)
PROGRAMS = {
    "transformers": REGISTERED,
    "timm": "import timm, nalaformer.models.vision; print(timm.is_model('nalaformer_t'))",
    "only the library": (
        "import sys; before = list(sys.meta_path); import nalaformer; "
        "print(*(name in sys.modules for name in ('timm', 'torchvision', 'transformers', 'nalaformer.models.vision')), "
        "sys.meta_path == before)"
    ),
    "nothing for the terminal is imported": (
        "import sys, nalaformer.analysis.attention_page, nalaformer.cli, nalaformer.op_bench\n"
        "print(sorted({'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    ),
    "the compiler is not imported": (
        "import sys\n"
        "has_it = lambda: any(name in sys.modules for name in ('torch._dynamo', 'torch._inductor', 'triton'))\n"
        "before = has_it(); import nalaformer; print(before, has_it())"
    ),
    "without diffusers": (
        "import sys; sys.modules['diffusers'] = None\n"
        "import nalaformer, nalaformer.models.diffusion as diffusion\n"
        "print(diffusion.DiffusionTransformer(**diffusion.layout_of('dit_s8') | {'depth': 1}).num_classes)\n"
        "try: nalaformer.NaLaDiT\n"
        "except ModuleNotFoundError as error: print(error)"
    ),
    "without timm": (
        "import sys; sys.modules['timm'] = None\n"
        "import nalaformer\n"
        "print(type(nalaformer.attention.build('nalaformer', dim=16, num_heads=2)).__name__)\n"
        "try: import nalaformer.models.vision\n"
        "except ModuleNotFoundError as error: print(error)"
    ),
}


@pytest.fixture(scope="module")
def answers():
    done = subprocess.run(
        [sys.executable, "-c", PARENT], input=json.dumps(PROGRAMS), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_models_registers_them_with_timm_and_transformers(answers):
    assert answers["timm"] == "True"
    assert answers["transformers"].split() == ["NaLaForCausalLM", "HybridForCausalLM"], answers["transformers"]


def test_importing_the_library_imports_no_other_package_and_watches_no_import(answers):
    assert answers["only the library"] == "False False False False True"


def test_importing_the_library_loads_no_heavy_packages(answers):
    assert answers["nothing for the terminal is imported"] == "[]"


def test_importing_the_library_does_not_import_the_compiler(answers):
    """Which takes as long to import as torch; a torch that brings it along is not our affair."""
    before, after = answers["the compiler is not imported"].split("\n")[0].split()
    assert after == before


def test_without_diffusers_networks_are_made_and_samplers_say_what_is_missing(answers):
    first, rest = answers["without diffusers"].split("\n", 1)
    assert first == "1000"
    assert "pip install 'nalaformer[diffusion]'" in rest


def test_without_timm_the_rest_works_and_the_models_say_what_is_missing(answers):
    first, rest = answers["without timm"].split("\n", 1)
    assert first == "Attention"
    assert "pip install 'nalaformer[vision]'" in rest
