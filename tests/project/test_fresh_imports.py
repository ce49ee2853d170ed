"""What importing does to an interpreter that has imported nothing but torch: one such process, forked for each question.

Most questions are about none of the packages that take long to import; those are asked after the process has imported them.
"""

import json
import subprocess
import sys

import pytest

PARENT = """
import json, os, sys, torch, traceback
answers = {}
programs, of_shared = json.loads(sys.stdin.read())
for name, program in [*programs.items(), (None, None), *of_shared.items()]:
    own = [name for name in sys.modules if name.split(".")[0] in ("nalaformer", "timm", "transformers", "typer", "rich")]
    assert not own, own
    if name is None:
        # what timm and transformers import
        import torch._dynamo, torch._inductor.standalone_compile, torch.distributed.tensor, torchvision
        import huggingface_hub, numpy, scipy.optimize, sympy
        continue
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

TRANSFORMERS_ORDERS = {
    "nalaformer first": "import nalaformer; from transformers import AutoModelForCausalLM",
    "transformers first": "from transformers import AutoModelForCausalLM; import nalaformer",
    # a module that imports the Auto classes while it is itself half imported
    "from inside transformers": "import nalaformer; from transformers import LlamaForCausalLM, AutoModelForCausalLM",
}
REGISTERED = (
    "import warnings; warnings.simplefilter('error', UserWarning); {order}; from transformers import AutoConfig; "
    "kinds = (type(AutoConfig.for_model(name)) for name in ('nala', 'nala_hybrid')); "
    "print(*(AutoModelForCausalLM._model_mapping[kind].__name__ for kind in kinds))"
)
TIMM_ORDERS = ("import nalaformer, timm", "import timm, nalaformer", "import nalaformer, timm.layers, timm")
# to ask where timm lies is not to import it
ASKED = "import importlib.util; importlib.util.find_spec('timm')"
NAMED = "print(timm.is_model('nalaformer_t'), timm.__spec__.loader.__class__.__name__)"
PROGRAMS = {
    "vision is not imported": (
        "import sys, nalaformer; print(*(name in sys.modules for name in ('timm', 'torchvision', 'nalaformer.models.vision')))"
    ),
    "language is not imported": (
        "import sys, nalaformer; print('transformers' in sys.modules); import transformers; "
        "print(*(name in sys.modules for name in ('transformers.modeling_utils', 'nalaformer.models.language')))"
    ),
    "nothing for the terminal is imported": (
        "import sys, nalaformer.analysis.attention_page, nalaformer.cli, nalaformer.op_bench\n"
        "print(sorted({'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    ),
    "the compiler is not imported": (
        "import sys\n"
        "has_it = lambda: any(name in sys.modules for name in ('torch._dynamo', 'torch._inductor', 'triton'))\n"
        "before = has_it(); import nalaformer; print(before, has_it())\n"
        "from nalaformer.ops import delta, interface; import torch._dynamo\n"
        "print(*(hasattr(module._packed, '_torchdynamo_orig_callable') for module in (delta, interface)))"
    ),
}
PROGRAMS_AFTER_SHARED_IMPORTS = {
    **{order: REGISTERED.format(order=imports) for order, imports in TRANSFORMERS_ORDERS.items()},
    **{order: f"{ASKED}; {order}; {ASKED}; {NAMED}" for order in TIMM_ORDERS},
    "the compiler comes first": (
        "import torch._dynamo, nalaformer; from nalaformer.ops import delta, interface\n"
        "print(*(hasattr(module._packed, '_torchdynamo_orig_callable') for module in (delta, interface)))"
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
    asked = json.dumps([PROGRAMS, PROGRAMS_AFTER_SHARED_IMPORTS])
    done = subprocess.run([sys.executable, "-c", PARENT], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("order", TRANSFORMERS_ORDERS)
def test_either_order_of_imports_registers_the_models_with_transformers(answers, order):
    assert answers[order].split() == ["NaLaForCausalLM", "HybridForCausalLM"], answers[order]


@pytest.mark.parametrize("order", TIMM_ORDERS)
def test_timm_knows_the_names_whichever_is_imported_first(answers, order):
    assert answers[order].split() == ["True", "SourceFileLoader"], answers[order]


def test_importing_the_library_does_not_import_timm_or_the_backbones(answers):
    assert answers["vision is not imported"] == "False False False"


def test_neither_package_makes_the_import_of_the_other_heavy(answers):
    assert answers["language is not imported"].split() == ["False", "False", "False"]


def test_importing_the_library_loads_no_heavy_packages(answers):
    assert answers["nothing for the terminal is imported"] == "[]"


def test_importing_the_library_does_not_import_the_compiler(answers):
    """Which takes as long to import as torch; a torch that brings it along is not our affair."""
    before, after = answers["the compiler is not imported"].split("\n")[0].split()
    assert after == before


@pytest.mark.parametrize("order", ["the compiler is not imported", "the compiler comes first"])
def test_the_compiler_leaves_packed_sequences_alone_whichever_is_imported_first(answers, order):
    assert answers[order].split("\n")[-1] == "True True", answers[order]


def test_without_diffusers_networks_are_made_and_samplers_say_what_is_missing(answers):
    first, rest = answers["without diffusers"].split("\n", 1)
    assert first == "1000"
    assert "pip install 'nalaformer[diffusion]'" in rest


def test_without_timm_the_rest_works_and_the_models_say_what_is_missing(answers):
    first, rest = answers["without timm"].split("\n", 1)
    assert first == "Attention"
    assert "pip install 'nalaformer[vision]'" in rest
