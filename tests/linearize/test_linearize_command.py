"""`nalaformer linearize`: what it writes, and what it refuses before any work."""

import errno
import json
import re
import shlex
import shutil
import sys

import pytest

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from helpers.converted_models import converted, make_model  # noqa: E402
from nalaformer.attention.hybrid import HybridSettings  # noqa: E402
from nalaformer.linearize import linearize, saving  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pretrained_folder(tmp_path_factory):
    """A model and its tokenizer as save_pretrained writes them, and text."""
    from nalaformer.data.text import train_tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    texts = [f"item {number} is {'red' if number % 3 else 'blue'} and lies in box {number % 7}." * 3 for number in range(120)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    tokenizer.save_pretrained(str(folder / "model"))
    make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder / "model")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def test_the_command_writes_a_model_that_transformers_loads(pretrained_folder, tmp_path):
    pytest.importorskip("peft")
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    # brackets and colons in a name are no markup
    out = tmp_path / "w[/x] :cat:"
    arguments = ["linearize", str(pretrained_folder / "model"), "--data", str(pretrained_folder / "text.jsonl")]
    arguments += ["--out", str(out), "--length", "64", "--steps", "2", "--finetune-steps", "2", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), [*arguments, "chunk_size=8", "selection=received"])
    assert done.exit_code == 0, done.output
    assert "after finetune: perplexity" in done.output
    assert f"model: {out}\n" in done.output
    assert f"report: {out}" in done.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.settings == HybridSettings(chunk_size=8, selection="received")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = tokenizer("item 7 is", return_tensors="pt").input_ids
    assert model.generate(tokens, max_new_tokens=20, do_sample=False).shape[1] > tokens.shape[1]
    writing = ["generate", "text", "--model", str(out), "--prompt", "item 7 is", "--max-new-tokens", "3", "--device", "cpu"]
    written = CliRunner().invoke(build_app(), writing)
    assert re.search(r"\d tokens, .* on cpu, cache [\d.]+ MiB", written.output), written.output
    card = (out / "README.md").read_text()
    assert "Text: `text.jsonl`, " in card
    assert " windows of 64 tokens" in card
    assert "attention transfer: 2 steps of 8 windows" in card
    # the card is for others: nothing of this machine
    assert str(pretrained_folder) not in card
    for name in ("report.html", "report.md", "transfer.png", "runs/linearize.json"):
        assert (out / name).exists()
    with pytest.raises(ValueError, match="got none; name files"):
        CliRunner().invoke(build_app(), ["linearize", "model"], catch_exceptions=False)


def run_command(folder, out, *, model="model", data="text.jsonl", length=64, more=()):
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    arguments = ["linearize", str(folder / model), "--data", str(folder / data), "--out", str(out), "--length", str(length)]
    arguments += ["selection=key_norm", "chunk_size=8", "--steps", "0", "--finetune-steps", "0", "--device", "cpu", *more]
    return CliRunner().invoke(build_app(), arguments, catch_exceptions=False)


def test_the_command_overwrites_no_folder_but_its_own(pretrained_folder, tmp_path):
    model = pretrained_folder / "model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match="a folder of its own"):
        run_command(pretrained_folder, model / ".." / "model")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="got one with other files"):
        run_command(pretrained_folder, tmp_path)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_used_folder_refuses_another_model_other_text_and_another_length(pretrained_folder, tmp_path):
    folder, out = tmp_path, tmp_path / "out"
    shutil.copytree(pretrained_folder, folder, dirs_exist_ok=True)
    assert run_command(folder, out).exit_code == 0
    assert run_command(folder, out).exit_code == 0
    with pytest.raises(ValueError, match="length was 64, is 32"):
        run_command(folder, out, length=32)
    make_model(vocab_size=300, initializer_range=0.01).save_pretrained(folder / "model")
    with pytest.raises(ValueError, match="weights was"):
        run_command(folder, out)
    with (folder / "text.jsonl").open("a") as file:
        file.write('\n{"text": "more"}')
    with pytest.raises(ValueError, match="data was"):
        run_command(folder, out)


def test_a_finished_conversion_says_so_and_is_not_evaluated_again(pretrained_folder, tmp_path, monkeypatch):
    out, runs = tmp_path / "out", []

    def counted(*arguments, **options):
        runs.append(options["config"])
        return linearize(*arguments, **options)

    monkeypatch.setattr("nalaformer.linearize.linearize", counted)
    assert run_command(pretrained_folder, out).exit_code == 0
    done = run_command(pretrained_folder, out)
    assert done.exit_code == 0
    assert len(runs) == 1
    assert f"finished already: {out} holds the model of these settings" in done.output
    # another attention is another model, and of this one nothing is left when that run is over
    assert run_command(pretrained_folder, out, more=["salient_per_chunk=2"]).exit_code == 0
    assert run_command(pretrained_folder, out).exit_code == 0
    # as a full disk leaves it
    (out / "model.safetensors").unlink()
    assert run_command(pretrained_folder, out).exit_code == 0
    assert [config.attention.salient_per_chunk for config in runs] == [4, 2, 4, 4]


def test_a_single_text_is_refused_with_a_remedy_that_works(pretrained_folder, tmp_path):
    from typer.testing import CliRunner

    from nalaformer.cli import build_app

    tmp_path = tmp_path / "a folder"
    shutil.copytree(pretrained_folder / "model", tmp_path / "model")
    (tmp_path / "book.txt").write_text("".join(f"line {number} of the only book.\n" for number in range(200)))
    with pytest.raises(ValueError, match=r"several documents.*--data DIR") as refused:
        run_command(tmp_path, tmp_path / "out", data="book.txt")
    _, *remedy = shlex.split(str(refused.value).split("`")[1].replace("DIR", f"'{tmp_path / 'tokens'}'"))
    assert CliRunner().invoke(build_app(), remedy).exit_code == 0
    # what failed before it had tokens does not keep the folder from other text
    assert run_command(tmp_path, tmp_path / "out", data="tokens").exit_code == 0


def test_tokens_of_another_tokenizer_are_refused(pretrained_folder, tmp_path):
    """Their numbers mean other words to the model; nothing else would tell."""
    from nalaformer.data.text import tokenize_corpus

    texts = [pretrained_folder / "text.jsonl"]
    tokenize_corpus(texts, tmp_path / "own", train_vocab=280, val_part=0.1)
    with pytest.raises(ValueError, match="must be those of the model's tokenizer"):
        run_command(pretrained_folder, tmp_path / "out", data=tmp_path / "own", more=["--dry-run"])
    tokenize_corpus(texts, tmp_path / "its", tokenizer=pretrained_folder / "model", val_part=0.1)
    assert run_command(pretrained_folder, tmp_path / "out", data=tmp_path / "its", more=["--dry-run"]).exit_code == 0


def test_what_cannot_be_converted_or_saved_is_refused_before_any_work(pretrained_folder, tmp_path):
    folder, out = tmp_path, tmp_path / "out"
    shutil.copytree(pretrained_folder, folder, dirs_exist_ok=True)
    converted(vocab_size=300).save_pretrained(folder / "hybrid")
    with pytest.raises(ValueError, match="converted already"):
        run_command(folder, out, model="hybrid")
    with pytest.raises(ValueError, match="converted already"):
        linearize(converted(), [], [], folder=out)
    (folder / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="must hold a tokenizer"):
        run_command(folder, out)
    for option in ("--steps", "--finetune-steps"):
        assert run_command(folder, out, more=[option, "-1"]).exit_code == 2
    assert not out.exists()


def test_a_model_of_another_build_and_a_missing_package_are_refused_before_the_text_is_read(
    pretrained_folder, tmp_path, monkeypatch
):
    shutil.copytree(pretrained_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(saving, "tokenize_corpus", lambda *_, **__: pytest.fail("was tokenized"))
    gpt2 = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=300)
    gpt2.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no `model\.layers`"):
        run_command(tmp_path, tmp_path / "out")
    shutil.copytree(pretrained_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        run_command(tmp_path, tmp_path / "out", more=["--steps", "1"])
    monkeypatch.setattr("nalaformer.atomic_files.free_bytes", lambda folder: 1000)
    with pytest.raises(ValueError, match="a converted model needs about"):
        run_command(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_window_longer_than_the_text_is_refused_before_the_model_is_loaded(pretrained_folder, tmp_path, monkeypatch):
    read = AutoModelForCausalLM.from_pretrained

    def without_values(*arguments, **options):
        assert options["device_map"] == "meta"
        return read(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", without_values)
    with pytest.raises(ValueError, match="an epoch must hold a whole batch"):
        run_command(pretrained_folder, tmp_path / "out", length=100_000, more=["--steps", "1"])


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=" ".join)
def test_windows_that_softmax_sees_whole_are_refused_before_the_text_is_read(pretrained_folder, tmp_path, monkeypatch, more):
    monkeypatch.setattr(saving, "tokenize_corpus", lambda *_, **__: pytest.fail("was tokenized"))
    with pytest.raises(ValueError, match=r"longer than the two chunks .* 2 x chunk_size = 128 tokens, got 128.*--length"):
        run_command(pretrained_folder, tmp_path / "out", length=128, more=["--steps", "1", "chunk_size=64", *more])


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("transfer.batchsize", "'transfer.batch_size'"),
        ("batchsize", "'finetune.batch_size' or 'transfer.batch_size'"),
        ("chnk_size", "'chunk_size'"),
    ],
)
def test_a_misspelt_setting_is_answered_with_a_name_that_is_taken(pretrained_folder, tmp_path, key, near):
    pytest.importorskip("peft")
    stages = ["--steps", "1", "--finetune-steps", "1"]
    with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean {near}"):
        run_command(pretrained_folder, tmp_path / "out", more=[*stages, f"{key}=8"])
    for name in re.findall("'(.*?)'", near):
        assert run_command(pretrained_folder, tmp_path / "out", more=[*stages, f"{name}=8", "--dry-run"]).exit_code == 0


def test_windows_longer_than_what_the_model_was_made_for_are_noted(pretrained_folder, tmp_path):
    for length, is_noted in ((512, False), (513, True)):
        said = run_command(pretrained_folder, tmp_path / "out", length=length, more=["--dry-run"]).output
        assert ("the model was trained for 512 tokens, got 513" in said) is is_noted


def test_a_full_disk_in_the_last_save_leaves_no_half_and_the_same_command_ends(pretrained_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    write = saving.sync_tree

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "sync_tree", full)
    with pytest.raises(OSError, match="out could not be written, the disk is full; make room"):
        run_command(pretrained_folder, out)
    assert sorted(path.name for path in out.iterdir()) == ["made_from.json", "runs", "tokens"]
    monkeypatch.setattr(saving, "sync_tree", write)
    assert run_command(pretrained_folder, out).exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(out) is not None


def test_a_claim_that_met_a_full_disk_does_not_keep_the_folder(pretrained_folder, tmp_path):
    (tmp_path / "out").mkdir()
    # what a version before this one, or a kill, has left
    for name in (".made_from.json_123", ".lock"):
        (tmp_path / "out" / name).touch()
    assert run_command(pretrained_folder, tmp_path / "out").exit_code == 0
