"""Files that are damaged, or made to harm: each is one line that names the file, on the command line too."""

import hashlib
import json
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save

from helpers.bombs import BOMBS
from nalaformer import cli
from nalaformer.data.text import TokenShards
from nalaformer.json_text import parse_json
from nalaformer.linearize.saving import MADE_FROM, claim_folder
from nalaformer.models.language import NaLaCache, NaLaConfig
from nalaformer.recipes.overrides import parsed
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
