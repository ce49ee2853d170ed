"""Files that are damaged, or made to harm: each is one line that names the file, on the command line too."""

import hashlib
import io
import json
import shutil
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from transformers import AutoConfig

from helpers.bombs import BOMBS
from nalaformer import cli, weight_files
from nalaformer.data.mapped_files import mapped
from nalaformer.data.text import TokenShards
from nalaformer.json_text import parse_json
from nalaformer.linearize.saving import MADE_FROM, claim_folder
from nalaformer.models.language import NaLaCache, NaLaConfig
from nalaformer.recipes import make_trainer, recipe_with
from nalaformer.recipes.overrides import parsed
from nalaformer.tasks.language import pretrained_model
from nalaformer.training import Checkpoint, Checkpoints
from nalaformer.training.checkpoint import MANIFEST, STATE, DamagedCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=BOMBS)
def bomb(request):
    return BOMBS[request.param]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """What a command says on stderr, which must be one line with exit code 2."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["nalaformer", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        error = capsys.readouterr().err
        assert (stopped.value.code, error.count("\n")) == (2, 1), error[-2000:]
        return error

    return run


@pytest.mark.parametrize("name", ["deep", "deep objects", "long number", "no utf-8", "no json"])
def test_what_is_no_json_is_a_value_error(name):
    with pytest.raises(ValueError, match=r"nested too deeply|Exceeds the limit|codec|Expecting"):
        parse_json(BOMBS[name])


def test_a_manifest_that_is_a_bomb_is_a_damaged_checkpoint(tmp_path, bomb):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, Checkpoint(tensors={"model": {"a": torch.ones(1)}}, state={"step": step}))
    (checkpoints.path(2) / MANIFEST).write_bytes(bomb)
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        checkpoints.load(2)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        found = checkpoints.newest()
    assert found is not None
    assert found[0] == 1


@pytest.mark.parametrize(("name", "content"), [(STATE, BOMBS["deep"]), ("model.safetensors", b"damaged" * 9)])
def test_a_manifest_that_fits_a_harmful_file_does_not_make_it_a_checkpoint(tmp_path, name, content):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Checkpoint(tensors={"model": {"a": torch.ones(1)}}, state={}))
    place = checkpoints.path(1)
    (place / name).write_bytes(content)
    digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in place.iterdir() if each.name != MANIFEST}
    (place / MANIFEST).write_text(json.dumps({"sha256": digests}))
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        checkpoints.load(1)


def test_an_index_of_tokens_that_is_a_bomb_is_named(tmp_path, bomb):
    (tmp_path / "index.json").write_bytes(bomb)
    with pytest.raises(ValueError, match=r"index.json cannot be read"):
        TokenShards.open(tmp_path)


def test_an_index_whose_vocabulary_is_infinite_is_named(tmp_path):
    (tmp_path / "index.json").write_text('{"format": "nalaformer tokens 1", "shards": ["a"], "vocab_size": 1e999}')
    with pytest.raises(ValueError, match=r"index.json cannot be read: OverflowError"):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize("shape", ["(-5,)", f"({10**18},)", f"({10**30},)", "('a',)"])
def test_an_array_that_is_not_as_long_as_it_says_is_named(tmp_path, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with pytest.raises(ValueError, match=r"a\.npy must be a whole \.npy file"):
        mapped(tmp_path / "a.npy")


def test_a_note_of_a_conversion_that_is_a_bomb_is_named(tmp_path, bomb):
    (tmp_path / "model").mkdir()
    (tmp_path / "out" / "tokens").mkdir(parents=True)
    (tmp_path / "out" / MADE_FROM).write_bytes(bomb)
    with pytest.raises(ValueError, match=f"{MADE_FROM} must say what is converted there"):
        claim_folder(tmp_path / "out", model=tmp_path / "model", data=[], length=8)


def test_options_that_are_a_bomb_are_refused():
    with pytest.raises(ValueError, match=r"data_options must be a JSON object"):
        parsed('{"a":' * 200_000, {}, "data_options")


def test_a_damaged_cache_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"damaged" * 9)
    with pytest.raises(ValueError, match=r"a whole file that NaLaCache.save wrote, got .*a.safetensors"):
        NaLaCache.load(tmp_path / "a.safetensors", NaLaConfig.from_size("nano"))


# --- as commands meet them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"damaged" * 9, b"", save({"a": torch.ones(9)})[:-4]], ids=["header", "empty", "cut"])
def test_convert_names_a_damaged_file(command, tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    said = command("convert", tmp_path / "a.safetensors", "--family", "nalaformer", "--out", tmp_path / "b.safetensors")
    assert f"{tmp_path / 'a.safetensors'} must be a whole safetensors file, got a damaged one" in said
    assert "fetch it again" in said


def llama(folder, **changes):
    """The config.json of a small Llama, and nothing else."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    from nalaformer.data.text import train_tokenizer

    return train_tokenizer(["a text"], vocab_size=280)


@pytest.mark.parametrize(
    "arguments",
    [
        ("linearize", "no such [folder]", "--data", "text.txt"),
        ("generate", "text", "--model", "no such [folder]", "--prompt", "a"),
        ("eval", "language", "--model", "no such [folder]", "--text", "text.txt"),
    ],
    ids=["linearize", "generate", "eval language"],
)
def test_a_model_folder_that_is_not_there_is_named(command, tmp_path, arguments):
    (tmp_path / "text.txt").write_text("a text")
    said = command(*arguments)
    assert "a model must be a folder that save_pretrained wrote, got no config.json in no such [folder]" in said


@pytest.mark.parametrize("content", [BOMBS["deep"], BOMBS["no json"]], ids=["bomb", "no json"])
def test_a_config_that_cannot_be_read_is_named(command, tmp_path, tokenizer, content):
    (tmp_path / "model").mkdir()
    tokenizer.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_bytes(content)
    wanted = f"{tmp_path / 'model' / 'config.json'} must be the JSON that save_pretrained wrote"
    assert wanted in command("linearize", tmp_path / "model", "--data", "text.txt")
    assert wanted in command("generate", "text", "--model", tmp_path / "model", "--prompt", "a")


@pytest.mark.parametrize("number", [0, -2])
def test_a_model_without_heads_is_refused_by_name(command, tmp_path, tokenizer, number):
    folder = llama(tmp_path / "model", num_attention_heads=number)
    tokenizer.save_pretrained(str(folder))
    for arguments in (("linearize", folder, "--data", "text.txt"), ("generate", "text", "--model", folder, "--prompt", "a")):
        wanted = f"num_attention_heads in {folder / 'config.json'} must be a positive whole number, got {number}; mend the file"
        assert wanted in command(*arguments)


def test_weights_that_are_damaged_are_named(command, tmp_path, tokenizer):
    folder = llama(tmp_path / "model")
    tokenizer.save_pretrained(str(folder))
    (folder / "model.safetensors").write_bytes(b"damaged" * 9)
    said = command("generate", "text", "--model", folder, "--prompt", "a")
    assert f"{folder} must hold a model that transformers can read, got SafetensorError" in said


# ---- weights that are not those of the model


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory, tokenizer):
    """A model of two layers with its tokenizer, and texts beside it."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("whole")
    folder = llama(place / "model", num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=64)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    (place / "text.jsonl").write_text("".join(json.dumps({"text": f"text {number}" * 9}) + "\n" for number in range(40)))
    return place


@pytest.fixture
def change_model(whole_model, tmp_path):
    """A copy of that model with other weights, and other fields in its config."""

    def change(tensors=None, *, lacking="-", **config):
        shutil.copytree(whole_model, tmp_path, dirs_exist_ok=True)
        file, folder = tmp_path / "model" / "model.safetensors", tmp_path / "model"
        given = {name: value for name, value in load_file(file).items() if lacking not in name}
        save_file(given | (tensors or {}), file, metadata={"format": "pt"})
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | config))
        return folder

    return change


def uses_of(model, *, out):
    """The commands that read the weights of a language model."""
    text = model.parent / "text.jsonl"
    convert = ("linearize", model, "--data", text, "--out", out, "--length", "16", "--steps", "0", "--finetune-steps", "0")
    small = ("train_documents=30", "eval_documents=9", "window=16", "steps=1", "warmup=0", "device=cpu")
    return {
        "linearize": (*convert, "--device", "cpu", "selection=key_norm", "chunk_size=4"),
        "linearize --dry-run": (*convert, "--device", "cpu", "selection=key_norm", "chunk_size=4", "--dry-run"),
        "generate text": ("generate", "text", "--model", model, "--prompt", "a", "--device", "cpu"),
        "eval language": ("eval", "language", "--model", model, "--text", text, "--device", "cpu"),
        "train": ("train", "lm_tiny", f"model={model}", f"tokenizer={model}", "attention=", *small, "--out", out),
    }


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("use", ["linearize", "linearize --dry-run", "generate text", "eval language", "train"])
def test_weights_that_a_file_lacks_are_not_made_up(command, change_model, tmp_path, use):
    folder = change_model(lacking=QUERY)
    said = command(*uses_of(folder, out=tmp_path / "out")[use])
    assert f"the weights must be those of this model, got none for {QUERY} in {folder}" in said
    assert not (tmp_path / "out").exists()


def test_layers_that_a_file_lacks_are_counted(command, change_model, tmp_path):
    said = command(*uses_of(change_model(num_hidden_layers=4), out=tmp_path / "out")["generate text"])
    assert "got none for model.layers.2.input_layernorm.weight, model.layers.2.mlp" in said
    assert "and 13 more" in said


def test_weights_that_no_part_of_the_model_takes_are_named(command, change_model, tmp_path):
    said = command(*uses_of(change_model(num_hidden_layers=1), out=tmp_path / "out")["generate text"])
    assert "got others: model.layers.1.input_layernorm.weight, " in said


def test_tied_weights_are_not_missing(change_model):
    folder = change_model(lacking="lm_head", tie_word_embeddings=True)
    assert pretrained_model(folder, vocab_size=2, dtype="auto").lm_head.weight.isfinite().all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("use", ["linearize", "generate text", "eval language", "train"])
def test_weights_that_are_not_finite_are_named(command, change_model, tmp_path, use, number):
    weight = torch.zeros(32, 32)
    weight[3, 5] = number
    folder = change_model({QUERY: weight})
    assert f"got NaN or infinity in {QUERY} of {folder}" in command(*uses_of(folder, out=tmp_path / "out")[use])


def test_a_file_of_weights_that_are_not_finite_is_named(tmp_path):
    save_file({"whole": torch.ones(2), "none": torch.ones(0), "bad": torch.tensor([1.0, np.nan])}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"got NaN or infinity in bad of .*a\.safetensors"):
        weight_files.read(tmp_path / "a.safetensors")


def test_cut_weights_are_named_before_the_conversion(command, whole_model, tmp_path):
    shutil.copytree(whole_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = command(*uses_of(tmp_path / "model", out=tmp_path / "out")["linearize --dry-run"])
    assert f"{tmp_path / 'model'} must hold a model that transformers can read" in said


@pytest.mark.parametrize("use", ["linearize", "linearize --dry-run", "eval language"])
def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(command, change_model, tmp_path, tokenizer, use):
    few = {name: torch.zeros(200, 32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    said = command(*uses_of(change_model(few, vocab_size=200), out=tmp_path / "out")[use])
    assert f"the model must know every token of the tokenizer ({len(tokenizer)}), got 200 in" in said


@pytest.mark.parametrize(("package", "extra"), cli.app.EXTRAS.items())
def test_a_missing_package_is_named_with_the_line_that_brings_it(monkeypatch, package, extra):
    def build():
        raise ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.inner")

    monkeypatch.setattr(cli.app, "build_app", build)
    with pytest.raises(SystemExit, match=rf"this command needs {package}: pip install 'nalaformer\[{extra}\]'"):
        cli.main()


def test_training_without_torchvision_says_what_to_install(monkeypatch, tmp_path):
    """timm needs it for images of a folder; generated ones do without."""
    from PIL import Image

    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / split / "a" / "0.png")
    for name in [each for each in sys.modules if each.split(".")[0] == "torchvision" or each.startswith("timm.data")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(sys, "argv", ["nalaformer", "train", "cue_grid", f"data={tmp_path}", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match=r"this command needs torchvision: pip install 'nalaformer\[vision\]'"):
        cli.main()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optimizer=adamww",), "unknown optimizer 'adamww'; did you mean 'adamw'"),
        (("seed=-1",), "seed must not be negative, got -1"),
        (("learning_rate=nan",), "learning_rate must be a finite number, got nan"),
        (("device=tpu",), 'device must be "cpu", "cuda" or "auto", got \'tpu\''),
    ],
)
def test_a_wrong_setting_of_a_training_is_one_line(command, settings, message):
    assert message in command("train", "cue_grid", "steps=1", "warmup=0", *settings)


# --- folders and runs that name code, files or the network ------------------------------------------------------------------


class Touch:
    """Its unpickling leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def touched(tmp_path):
    """A file that code from one of the files below would leave."""
    return tmp_path / "touched"


def write_code(path, touched):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"from pathlib import Path\nPath({str(touched)!r}).touch()\nclass Evil: pass\n")


def test_linearize_runs_no_code_of_a_folder_whatever_is_answered(command, tmp_path, tokenizer, touched, monkeypatch):
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    folder = llama(tmp_path / "model", model_type="evil", auto_map=auto_map)
    tokenizer.save_pretrained(str(folder))
    write_code(folder / "evil.py", touched)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    said = command("linearize", folder, "--data", "text.txt")
    assert f"{folder} must hold a model that transformers can read" in said
    assert not touched.exists()


TINY = {"embed_dims": [16], "depths": [1], "num_heads": [2], "mlp_ratios": 1, "attention_stages": "l", "layer_scale": [None]}
TINY |= {"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 48}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step that names images."""
    folder = tmp_path_factory.mktemp("trained")
    settings = ["model=vit_nala_tiny_patch16", f"model_options={json.dumps(TINY)}", "train_samples=2", "eval_samples=2"]
    settings += ["steps=1", "warmup=0", "batch_size=2", "device=cpu"]
    make_trainer(recipe_with("cue_grid", settings), folder).fit()
    return folder


@pytest.fixture
def run_with(trained, tmp_path):
    """A copy of that run whose state.json was changed by a function, with a manifest that fits."""

    def make(change):
        folder = tmp_path / "run"
        shutil.copytree(trained, folder)
        checkpoints = Checkpoints(folder / "checkpoints")
        place = checkpoints.path(checkpoints.steps()[-1])
        state = json.loads((place / STATE).read_text())
        change(state)
        (place / STATE).write_text(json.dumps(state))
        manifest = json.loads((place / MANIFEST).read_text())
        manifest["sha256"][STATE] = hashlib.sha256((place / STATE).read_bytes()).hexdigest()
        (place / MANIFEST).write_text(json.dumps(manifest))
        return folder

    return make


@pytest.fixture
def photo(tmp_path):
    from PIL import Image

    Image.new("RGB", (48, 48)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def hostile_options(path):
    """Options by which timm reads a file."""
    source = {"file": str(path)}
    return {
        "checkpoint_path": {"checkpoint_path": str(path)},
        "pretrained_cfg": {"pretrained": True, "pretrained_cfg": source},
        "pretrained_cfg_overlay": {"pretrained": True, "pretrained_cfg_overlay": source},
        "cache_dir": {"pretrained": True, "cache_dir": str(path)},
    }


@pytest.mark.parametrize("option", hostile_options("x"))
@pytest.mark.parametrize("model", ["vit_nala_tiny_patch16", "resnet10t"])
def test_a_run_that_names_a_file_of_weights_is_refused(command, run_with, tmp_path, touched, photo, option, model):
    torch.save({"state_dict": Touch(touched)}, tmp_path / "evil.pth")
    options = (TINY if model.startswith("vit_nala") else {}) | hostile_options(tmp_path / "evil.pth")[option]
    folder = run_with(lambda state: state["settings"].update(model=model, attention="", model_options=options))
    said = command("predict", photo, "--run", folder)
    assert f"model_options must not say where weights are read from, got {option}" in said
    assert not touched.exists()


@pytest.mark.parametrize("model", ["hf-hub:someone/evil", "h\tf-hub:evil", "local-dir:evil", "../evil"])
def test_a_run_whose_model_is_elsewhere_is_refused(command, run_with, photo, model, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    folder = run_with(lambda state: state["settings"].update(model=model))
    assert "a model must be named as timm lists it, got" in command("predict", photo, "--run", folder)


def test_a_run_that_started_from_downloaded_weights_downloads_nothing_to_answer(run_with, photo, monkeypatch, capsys):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    folder = run_with(lambda state: state["settings"]["model_options"].update(pretrained=True))
    monkeypatch.setattr(sys, "argv", ["nalaformer", "predict", str(photo), "--run", str(folder), "--device", "cpu"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert "photo.png" in capsys.readouterr().out


# some releases of diffusers run a file that is named as a part's library, or as the pipeline that nobody asked for
@pytest.mark.parametrize("place", ["evil.py", "None.py", "transformer/nalaformer.models.diffusion.model.py"])
def test_a_pipeline_with_code_in_its_folder_is_refused(command, tmp_path, touched, place):
    folder = saved_pipeline(tmp_path / "pipe")
    write_code(folder / place, touched)
    assert f"a pipeline's folder must hold no code, got {folder / place}" in command("generate", "images", "--run", folder)
    assert not touched.exists()


@pytest.mark.parametrize("entry", ["_class_name", "transformer", "vae", "more"])
def test_a_pipeline_of_other_classes_is_refused(command, tmp_path, touched, monkeypatch, entry):
    folder = saved_pipeline(tmp_path / "pipe")
    write_code(tmp_path / "evil.py", touched)
    monkeypatch.syspath_prepend(tmp_path)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {entry: ["evil", "Evil"]}))
    said = command("generate", "images", "--run", folder)
    assert f"{folder / 'model_index.json'} must name the parts of a NaLaDiTPipeline alone" in said
    assert not touched.exists()


def saved_pipeline(folder):
    from nalaformer import NaLaDiT, NaLaDiTPipeline

    sizes = {"depth": 1, "dim": 16, "num_heads": 2, "channels": 3, "num_classes": 2, "height": 4, "width": 4}
    NaLaDiTPipeline(NaLaDiT(**sizes)).save_pretrained(folder)
    return folder


# --- runs that are incomplete, of another version, or too large -------------------------------------------------------------

CHANGES = {
    "no settings": (lambda state: state.pop("settings"), "'settings'"),
    "no progress": (lambda state: state.pop("progress"), "'progress'"),
    "settings of nothing": (lambda state: state.update(settings=None), "NoneType"),
    "no facts": (lambda state: state["settings"].pop("facts"), "'facts'"),
    "a newer recipe": (lambda state: state["settings"].update(colour=1), "colour"),
    "a newer task": (lambda state: state["settings"]["task"].update(colour=1), "colour"),
    "a newer trainer": (lambda state: state["settings"]["training"].update(colour=1), "colour"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_state_that_this_version_has_not_written_is_one_sentence(command, run_with, photo, kind):
    change, word = CHANGES[kind]
    folder = run_with(change)
    said = command("predict", photo, "--run", folder)
    assert f"{folder} must hold a run that this version of nalaformer can read" in said
    assert word in said


def test_a_run_of_another_model_is_one_sentence(command, run_with, photo):
    folder = run_with(lambda state: state["settings"].update(model="resnet10t", attention="", model_options={}))
    said = command("predict", photo, "--run", folder)
    assert "the weights must be those of this model, got none for bn1.bias" in said
    assert str(folder) in said


@pytest.mark.parametrize("part", ["settings", "progress", "optimizer", "newer progress"])
def test_training_goes_on_from_no_state_that_lacks_a_part(run_with, part):
    folder = run_with(lambda state: state["progress"].update(colour=1) if " " in part else state.pop(part))
    settings = ["model=vit_nala_tiny_patch16", f"model_options={json.dumps(TINY)}", "train_samples=2", "eval_samples=2"]
    settings += ["steps=1", "warmup=0", "batch_size=2", "device=cpu"]
    with pytest.raises(ValueError, match="must hold a run that this version of nalaformer can read"):
        make_trainer(recipe_with("cue_grid", settings), folder).fit()


@pytest.mark.parametrize("place", ["task", "model_options", "data_options"])
def test_an_image_without_end_is_refused_before_anything_is_built(command, run_with, photo, place):
    def change(state):
        settings = state["settings"]
        if place == "task":
            settings["task"].update(data=str(photo.parent), image_size=10**6)
        elif place == "model_options":
            settings["model_options"].update(img_size=10**5)
        else:
            settings["task"]["data_options"].update(cells=10**5)

    said = command("predict", photo, "--run", run_with(change))
    assert "must be at most 8192, got" in said
