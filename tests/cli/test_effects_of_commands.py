"""Every option of the commands that make data, train, use what was trained, and look at attention."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from helpers.option_effects import Effects
from nalaformer import cli
from nalaformer.analysis import methods
from nalaformer.data import CueGrid
from nalaformer.data.sequences import Stored
from nalaformer.data.text import Tales, TokenShards, fingerprint, load_tokenizer, train_tokenizer
from nalaformer.recipes import RECIPES, evaluate_run, load_run
from nalaformer.studies.scoreboard import runs as scoreboard
from nalaformer.studies.scoreboard.report import read_rows
from nalaformer.tasks import Answer, Classification
from nalaformer.training import Checkpoints
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")

# their options are seen to with what they do: linearization, language models, samples, published weights, benchmarks, maps
ELSEWHERE = (
    *("linearize", "generate", "eval language", "eval images", "data encode", "data unpack", "convert", "bench"),
    *("analyze", "explore"),
)


def commands(command, path=()):
    """Every command below, with the names of its options."""
    if not hasattr(command, "commands"):
        return {" ".join(path): [parameter.name for parameter in command.params]}
    return {name: found for part, inner in command.commands.items() for name, found in commands(inner, (*path, part)).items()}


COMMANDS = Effects(
    f"{name}.{option}"
    for name, options in commands(typer.main.get_command(cli.build_app())).items()
    for option in options
    if not name.startswith(ELSEWHERE)
)


def test_no_option_is_without_a_test_of_its_effect():
    assert COMMANDS.missing() == []


def run(*arguments, fails=None):
    """What a command prints; or, where it should fail, its error."""
    done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])
    if fails is None:
        assert done.exit_code == 0, f"{done.output} {done.exception!r}"
        return done.output
    assert done.exception is not None, done.output
    assert fails in str(done.exception)
    return str(done.exception)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


SMALL = {
    **{"embed_dims": [16], "depths": [1], "num_heads": [2], "mlp_ratios": 1, "attention_stages": "l", "layer_scale": [None]},
    **{"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 32, "global_pool": "max"},
}
SHORT = (
    *("steps=4", "warmup=0", "batch_size=4", "eval_every=1", "save_every=1", "keep=9", "train_samples=16", "eval_samples=12"),
    *('data_options={"cells": 4}', f"model_options={json.dumps(SMALL)}", "learning_rate=1e-2", "device=cpu"),
)


@pytest.fixture(scope="module")
def image_run(tmp_path_factory):
    """Four steps, all of them evaluated and kept; in low precision, in which evaluation must run too to give the same."""
    folder = tmp_path_factory.mktemp("commands") / "run"
    run("train", "cue_grid", *SHORT, "precision=bfloat16", "--out", folder)
    return folder


# ---- train, recipes


@COMMANDS.of("train.recipe", "train.settings", "train.out")
def test_train_trains_that_recipe_with_these_settings_into_that_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = [*SHORT, "steps=2", "batch_size=8", "eval_every=0", "save_every=0", 'data_options={"cells": 4, "glyphs": 3}']
    run("train", "cue_grid", *quick, "--out", tmp_path / "mine")
    run("train", "count_grid", *quick, 'data_options={"cells": 4, "most": 7}')
    assert load_run(tmp_path / "mine").facts["classes"] == ["disc", "square", "cross"]
    assert load_run(tmp_path / "runs" / "count_grid").facts["classes"] == list("1234567")
    assert Checkpoints(tmp_path / "mine" / "checkpoints").steps() == [2]
    assert load_run(tmp_path / "mine").recipe.training.batch_size == 8


@COMMANDS.of("recipes.recipe")
def test_recipes_shows_the_one_that_is_named():
    shown = run("recipes", "count_grid")
    assert "count_grid" in shown
    assert "eval_samples" in shown
    assert "marked_pair" not in shown
    assert all(name in run("recipes") for name in RECIPES.names())


# ---- eval


def figure(output, name):
    """The value of a row of the table."""
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines()]
    return next(row[2] for row in rows if row[1:2] == [name])


def logged(folder, step):
    return next(row for row in read_log(folder / "log.jsonl") if (row["kind"], row["step"]) == ("eval", step))


@COMMANDS.of("eval run.run", "eval run.step")
def test_eval_gives_the_figures_of_its_step_or_of_the_best(image_run):
    losses = {step: f"{logged(image_run, step)['loss']:.4g}" for step in (1, 2, 3, 4)}
    assert len(set(losses.values())) == 4
    for step in (1, 3):
        assert figure(run("eval", image_run, "--step", step, "--device", "cpu"), "loss") == losses[step]
        assert evaluate_run(image_run, step=step, device="cpu").metrics["loss"] == logged(image_run, step)["loss"]
    accuracies = [logged(image_run, step)["top1"] for step in (1, 2, 3, 4)]
    best = 1 + accuracies.index(max(accuracies))
    shown = run("eval", image_run, "--device", "cpu")
    assert figure(shown, "loss") == losses[best]
    assert f"step {best}" in shown


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Red and blue images, the same with the names of the classes exchanged, and a run that has learned the first."""
    tmp_path = tmp_path_factory.mktemp("folders")
    for data, names in (("mine", ("red", "blue")), ("exchanged", ("blue", "red"))):
        for split in ("train", "val"):
            for channel, name in ((0, names[0]), (2, names[1])):
                for number in range(4):
                    path = tmp_path / data / split / name / f"{number}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    pixels = np.random.default_rng(number).integers(0, 90, (32, 32, 3), dtype=np.uint8)
                    pixels[..., channel] = 220
                    Image.fromarray(pixels).save(path)
    small = [*SHORT, "steps=20", "batch_size=8", "eval_every=0", "save_every=0", "data_options={}", "image_size=32"]
    run("train", "cue_grid", f"data={tmp_path / 'mine'}", *small, "--out", tmp_path / "run")
    return tmp_path


@COMMANDS.of("eval run.data")
def test_eval_looks_at_other_data(folders):
    own, exchanged = (
        run("eval", folders / "run", "--device", "cpu", *chosen) for chosen in ((), ("--data", folders / "exchanged"))
    )
    assert figure(own, "top1") == "1"
    assert figure(exchanged, "top1") == "0"
    # other classes are another question
    for split in ("train", "val"):
        for name in ("red", "green"):
            shutil.copytree(folders / "mine" / split / "red", folders / "other" / split / name)
    run(
        "eval",
        folders / "run",
        "--device",
        "cpu",
        "--data",
        folders / "other",
        fails="must have the classes of the run's own data",
    )


def test_eval_names_the_files_that_it_leaves_out(folders):
    shutil.copytree(folders / "mine", folders / "harmed")
    broken = folders / "harmed" / "val" / "red" / "1.png"
    broken.write_bytes(broken.read_bytes()[:100])
    shown = run("eval", folders / "run", "--data", folders / "harmed", "--device", "cpu")
    assert f"left out: {broken}" in shown
    assert figure(shown, "images") == "7"


@COMMANDS.of("eval run.split")
def test_eval_looks_at_the_split_that_is_asked_for(tmp_path):
    settings = ["steps=1", "warmup=0", "batch_size=4", "eval_every=0", "save_every=0", "device=cpu"]
    settings += [
        "train_samples=8",
        "eval_samples=6",
        "test_samples=5",
        'data_options={"length": 12}',
        'model_options={"dim": 16}',
    ]
    run("train", "copying", *settings, "--out", tmp_path / "run")
    for split, sequences in (("val", 6), ("test", 5)):
        assert figure(run("eval", tmp_path / "run", "--split", split, "--device", "cpu"), "answers") == str(6 * sequences)
    run("eval", tmp_path / "run", "--split", "train", fails='"val" or "test"')


@COMMANDS.of("eval run.device", "predict.device")
def test_a_device_that_is_not_there_is_refused(image_run, no_gpu, tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    for command in (("eval", image_run), ("predict", tmp_path / "a.png", "--run", image_run)):
        run(*command, "--device", "cuda", fails="needs a CUDA device")
        run(*command, "--device", "auto")


# ---- predict


@dataclass(frozen=True)
class Colour:
    colour: str = "red"


@pytest.fixture
def painting(monkeypatch):
    """Classification that answers with a picture, of a colour that may be chosen."""

    def answer(self, model, image, facts, options):
        return Answer(cells=("painted",), values=None, picture=Image.new("RGB", (3, 3), options.colour))

    monkeypatch.setattr(Classification, "answer", answer)
    monkeypatch.setattr(Classification, "AnswerOptions", Colour)


@COMMANDS.of("predict.out", "predict.choose")
def test_predict_writes_pictures_as_chosen_where_it_is_told(painting, image_run, tmp_path):
    CueGrid(split="val", samples=1, cells=8).write(tmp_path / "images")
    pixels = []
    for number, options in enumerate(([], ["--set", "colour=blue"])):
        target = tmp_path / f"{number}.png"
        run("predict", tmp_path / "images", "--run", image_run, "--out", target, *options)
        pixels.append(Image.open(target).getpixel((0, 0)))
    assert pixels == [(255, 0, 0), (0, 0, 255)]


@COMMANDS.of("predict.images", "predict.run")
def test_predict_names_each_image_by_that_run(image_run, folders):
    red, blue = (folders / "mine" / "val" / name / "0.png" for name in ("red", "blue"))
    lines = [line for line in run("predict", red, blue.parent, "--run", folders / "run").splitlines() if "%" in line]
    assert len(lines) == 1 + 4
    first = [line.split("│")[2].split()[0] for line in lines]
    assert first == ["red"] + ["blue"] * 4
    assert "disc" in run("predict", red, "--run", image_run)


# ---- text


@pytest.fixture
def texts(tmp_path):
    """Forty documents under "text" and under "other", of which two lines are broken; three lines of a text file."""
    rows = [json.dumps({"text": tale, "other": "word"}) for tale in Tales(split="train", documents=40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "broken", "broken"]) + "\n")
    (tmp_path / "b.txt").write_text("one line\nand another\nand a third\n")
    return tmp_path


def tokenized(folder, split):
    """The documents of a split as text."""
    words = load_tokenizer(folder / "tokenizer")
    return [
        words.decode(shard.tokens[start + 1 : end - 1].tolist())
        for shard in TokenShards.open(folder / split).shards
        for start, end in zip([0, *shard.ends[:-1]], shard.ends, strict=True)
    ]


@COMMANDS.of("train.dry_run", "tokenize.dry_run", "data make.dry_run")
def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tmp_path):
    texts = tmp_path / "a.txt"
    texts.write_text("a text")
    said = run("train", "cue_grid", "steps=6", "batch_size=8", "--out", tmp_path / "run", "--dry-run")
    assert "cue_grid: 6 steps of 8" in said
    said = run("tokenize", texts, "--train-vocab", "300", "--out", tmp_path / "tokens", "--dry-run")
    assert "train: 1 files" in said
    assert "tokenizer: trained, 300 entries" in said
    counts = ("--samples", 20, "--val-samples", 0, "--test-samples", 0)
    said = run("data", "make", "copying", "--out", tmp_path / "data", *counts, "--dry-run")
    assert said.startswith("train: 20 sequences")
    assert said.rstrip().endswith("; new")
    assert list(tmp_path.iterdir()) == [texts]


@COMMANDS.of("tokenize.files", "tokenize.out", "tokenize.train_vocab", "tokenize.val")
def test_tokenize_writes_the_documents_of_its_files(texts):
    run("tokenize", texts / "a.jsonl", "--train-vocab", 270, "--val", texts / "b.txt", "--out", texts / "out")
    assert tokenized(texts / "out", "train") == list(Tales(split="train", documents=40))
    assert tokenized(texts / "out", "val") == ["one line\nand another\nand a third\n"]
    assert len(load_tokenizer(texts / "out" / "tokenizer")) == 270


@COMMANDS.of("tokenize.tokenizer")
def test_tokenize_uses_the_tokenizer_of_a_folder(texts):
    words = train_tokenizer(["a different text"], vocab_size=261)
    words.save_pretrained(str(texts / "words"))
    run("tokenize", texts / "a.jsonl", "--tokenizer", texts / "words", "--val", texts / "b.txt", "--out", texts / "out")
    assert fingerprint(load_tokenizer(texts / "out" / "tokenizer")) == fingerprint(words)
    assert TokenShards.open(texts / "out" / "train").vocab_size == 261


@COMMANDS.of("tokenize.val_part")
def test_tokenize_takes_a_part_for_evaluation(texts):
    for part in (0.1, 0.5):
        run("tokenize", texts / "a.jsonl", "--train-vocab", 260, "--val-part", part, "--out", texts / str(part))
        # four standard deviations of a binomial count
        assert len(tokenized(texts / str(part), "val")) == pytest.approx(40 * part, abs=4 * (40 * part * (1 - part)) ** 0.5)


@COMMANDS.of("tokenize.field")
def test_tokenize_reads_the_field(texts):
    run("tokenize", texts / "a.jsonl", "--train-vocab", 260, "--field", "other", "--val-part", 0.3, "--out", texts / "out")
    assert set(tokenized(texts / "out", "train")) == {"word"}


@COMMANDS.of("tokenize.txt")
def test_tokenize_takes_files_or_lines_for_documents(texts):
    for kind, documents in (("file", 1), ("line", 3)):
        arguments = ("--train-vocab", 260, "--txt", kind, "--val", texts / "b.txt", "--out", texts / kind)
        run("tokenize", texts / "b.txt", *arguments)
        assert len(tokenized(texts / kind, "train")) == documents


@COMMANDS.of("tokenize.most_bad")
def test_tokenize_stops_after_so_many_bad_lines(texts):
    arguments = ("--train-vocab", 260, "--val-part", 0.3, "--out", texts / "out")
    run("tokenize", texts / "a.jsonl", *arguments, "--most-bad", 1, fails="more than 1 lines cannot be read")
    assert "left out: 2" in run("tokenize", texts / "a.jsonl", *arguments, "--most-bad", 2)


@COMMANDS.of("export.run", "export.out", "export.step", "export.tokenizer")
def test_export_writes_the_model_of_its_step_with_its_tokenizer(texts):
    from transformers import AutoModelForCausalLM

    run("tokenize", texts / "a.jsonl", "--train-vocab", 260, "--val-part", 0.3, "--out", texts / "tokens")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    settings = ["model=nano", f"model_options={json.dumps(sizes)}", "window=16", "steps=2", "warmup=0", "batch_size=2"]
    settings += ["eval_every=0", "save_every=1", "learning_rate=1e-2", "precision=float32", "workers=0", "device=cpu"]
    run("train", "lm_text", f"data={texts / 'tokens'}", *settings, "--out", texts / "run")
    for step in (1, 2):
        run("export", texts / "run", "--step", step, "--out", texts / f"model{step}")
        found = AutoModelForCausalLM.from_pretrained(texts / f"model{step}").state_dict()
        saved = Checkpoints(texts / "run" / "checkpoints").load(step).tensors["model"]
        assert all(torch.equal(found[name], value) for name, value in saved.items())
    # the data has moved
    (texts / "tokens").rename(texts / "moved")
    run("export", texts / "run", "--out", texts / "model", fails="data must be a folder")
    run("export", texts / "run", "--out", texts / "model", "--tokenizer", texts / "moved" / "tokenizer")
    assert fingerprint(load_tokenizer(texts / "model")) == load_run(texts / "run").facts["tokenizer"]


# ---- sequences


@COMMANDS.of(
    *("data make.name", "data make.out", "data make.samples", "data make.val_samples", "data make.test_samples"),
    *("data make.seed", "data make.options"),
)
def test_data_make_writes_the_sequences_that_are_asked_for(tmp_path):
    counts = ("--samples", 7, "--val-samples", 5, "--test-samples", 3)
    run("data", "make", "induction", "--out", tmp_path / "a", *counts, "--options", '{"length": 12}')
    for split, count in (("train", 7), ("val", 5), ("test", 3)):
        data = Stored(tmp_path / "a", split=split)
        assert (data.name, data.split, len(data), data.facts.length, data.seed) == ("induction", split, count, 12, 0)
    counts = ("--samples", 7, "--val-samples", 0, "--test-samples", 0)
    run("data", "make", "induction", "--out", tmp_path / "b", *counts, "--options", '{"length": 12}', "--seed", 1)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["train"]
    zero, one = (Stored(tmp_path / name, split="train") for name in "ab")
    assert one.seed == 1
    assert not torch.equal(zero[0]["inputs"], one[0]["inputs"])


@COMMANDS.of("data make.workers")
def test_data_make_has_so_many_workers(tmp_path, monkeypatch):
    # that several of them write what one writes is seen where they are started
    asked = []
    monkeypatch.setattr("nalaformer.data.sequences.write", lambda *_, workers, **__: asked.append(workers))
    for workers in (1, 3):
        run("data", "make", "copying", "--out", tmp_path, "--samples", 2, "--workers", workers)
    assert asked == [1, 1, 1, 3, 3, 3]


BOARD = (
    *("train_samples=16", "eval_samples=6", "test_samples=5", "batch_size=8", "eval_every=1", "warmup=0"),
    *('data_options={"vocabulary": 32, "mixture": [[16, 2]]}', 'model_options={"dim": 16}'),
)


def board(out, *arguments, task="mqar_small", steps=2):
    """The rows of a small scoreboard."""
    usual = {"--methods": "relu", "--seeds": 1, "--steps": steps, "--device": "cpu", "--out": out}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    run("scoreboard", task, *BOARD, *(part for pair in (usual | given).items() for part in pair))
    return read_rows(Path((usual | given)["--out"]))


@COMMANDS.of("scoreboard.task", "scoreboard.settings", "scoreboard.steps", "scoreboard.out")
def test_a_scoreboard_is_of_its_task_and_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (row,) = board(tmp_path / "a.csv", steps=3)
    assert (row["task"], row["steps"]) == ("mqar_small", "3")
    settings = json.loads(row["settings"])
    assert settings["training"]["batch_size"] == 8
    assert settings["data"]["test_samples"] == 5
    # without a number of steps those of the recipe, without a file one by the name of the task
    run("scoreboard", "mqar_small", *BOARD, "steps=2", "--methods", "relu", "--seeds", 1, "--device", "cpu")
    (row,) = read_rows(tmp_path / "runs" / "scoreboard_mqar_small.csv")
    assert row["steps"] == "2"


@COMMANDS.of("scoreboard.methods", "scoreboard.seeds", "scoreboard.learning_rates", "scoreboard.every_rate")
def test_a_scoreboard_trains_every_method_with_every_rate_and_seed(tmp_path):
    asked = ("--methods", "relu, split", "--seeds", 2, "--learning-rates", "1e-3,2e-3")
    # the second seed at one rate of each method, and then at the other too
    assert len(board(tmp_path / "a.csv", *asked, steps=1)) == 6
    flags = ("--steps", 1, "--device", "cpu", "--out", tmp_path / "a.csv", "--every-rate")
    run("scoreboard", "mqar_small", *BOARD, *asked, *flags)
    rows = read_rows(tmp_path / "a.csv")
    found = sorted((row["method"], row["learning_rate"], row["seed"]) for row in rows)
    assert found == [(method, rate, seed) for method in ("relu", "split") for rate in ("0.001", "0.002") for seed in "01"]
    # other weights and another order for another seed, larger steps with a larger rate
    assert len({row["dev"] + row["test"] for row in rows}) > 1
    (row,) = board(tmp_path / "b.csv", steps=1)
    assert float(row["learning_rate"]) == RECIPES["mqar_small"]().training.learning_rate


# seen to in tests/studies/test_scoreboard_rows.py
COMMANDS.of("scoreboard.jobs", "scoreboard.smoke")


@COMMANDS.of("scoreboard.device")
def test_a_scoreboard_without_its_device_is_refused(tmp_path, no_gpu):
    run("scoreboard", "mqar_small", *BOARD, "--device", "cuda", "--out", tmp_path / "a.csv", fails="needs a CUDA device")


@COMMANDS.of("scoreboard.minutes")
def test_a_scoreboard_stops_after_its_minutes_and_goes_on(tmp_path):
    assert board(tmp_path / "a.csv", "--minutes", 1e-9) == []
    assert len(board(tmp_path / "a.csv", "--minutes", 0)) == 1


@COMMANDS.of("scoreboard.data_folder", "scoreboard.workers")
def test_a_scoreboard_keeps_its_data_and_makes_it_with_workers(tmp_path, monkeypatch):
    made, write = [], scoreboard.write
    monkeypatch.setattr(scoreboard, "write", lambda *a, workers, **k: made.append(workers) or write(*a, **k))
    board(tmp_path / "a.csv", "--data-folder", tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["test", "train", "val"]
    board(tmp_path / "b.csv", "--data-folder", tmp_path / "data")
    assert made == [1, 1, 1]
    board(tmp_path / "c.csv", "--workers", 3)
    assert made == [1, 1, 1, 3, 3, 3]


# ---- looking at attention


@COMMANDS.of("models.pattern")
def test_models_shows_those_that_match():
    shown = run("models", "*_xt")
    assert "nalaformer_xt" in shown
    assert "nalaformer_t" not in shown
    # on a terminal of usual width nothing is cut
    assert "…" not in run("models")
    weights = {line.split()[1]: line.split()[-2] for line in run("models").splitlines() if line.startswith("│")}
    assert (weights["flatten_swin_b_384"], weights["nalaformer_s"], weights["mirrorla_s"]) == ("released", "announced", "-")
    run("models", "no_such_*", fails="no backbone is named like")


@COMMANDS.of("compare.out", "compare.tokens", "compare.seed")
def test_compare_looks_at_so_many_tokens_of_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("nalaformer.analysis.compare.time_of_call", lambda phi: 1.0)
    # two methods are enough, and what is in the picture is seen to with the picture
    monkeypatch.setattr("nalaformer.analysis.methods", lambda: methods()[:2])
    monkeypatch.setattr("nalaformer.analysis.draw_entropy_against_norm", lambda rows, path, num_tokens: path)
    shown = {
        (tokens, seed): run("compare", "--out", tmp_path, "--tokens", tokens, "--seed", seed)
        for tokens, seed in ((32, 0), (32, 1), (48, 0))
    }
    assert len(set(shown.values())) == 3
    assert "48 random tokens" in shown[48, 0]
    assert f"picture: {tmp_path / 'entropy_vs_norm.png'}" in shown[48, 0]


@COMMANDS.of("compare.trained", "compare.steps")
def test_compare_trains_networks_and_draws_what_they_do(tmp_path, monkeypatch):
    from nalaformer.studies.demo import ENTRIES, trained

    whole = trained.diagnose_trained
    monkeypatch.setattr(trained, "diagnose_trained", lambda *a, **k: whole(*a, **k, entries=ENTRIES[:2], workers=1))
    shown = run("compare", "--trained", "--steps", 2, "--seed", 5, "--out", tmp_path)
    assert f"picture: {tmp_path / 'entropy_vs_norm_trained.png'}" in shown
    assert "linear (ReLU)" in shown
    # a newcomer sees that something happens, on one core too
    assert "pointing: linear (ReLU), seed 5: accuracy" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"entropy_vs_norm_trained.png", "entropy_vs_norm_trained.svg", "runs"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"pointing_softmax_seed5", "pointing_linear__relu__seed5"}
    log = read_log(tmp_path / "runs" / "pointing_softmax_seed5" / "log.jsonl")
    assert sum(row["kind"] == "step" for row in log) == 2
    run("compare", "--trained", "--tokens", 32, fails="which --trained does without, got 32; leave one of them out")
    run("compare", "--steps", 32, fails="got 32 without --trained; add it")
    run("compare", "--trained", "--steps", 0, fails="steps must be positive, got 0; leave them out")
    run("compare", "--trained", "--seed", -1, fails="seed must not be negative, got -1; take 0 or more")


@COMMANDS.of("demo.all_methods")
def test_all_methods_of_the_demo_are_those_that_it_leaves_out_for_time_too(tmp_path, monkeypatch):
    from nalaformer.studies import demo

    chosen = []

    class Result:
        def findings(self):
            return []

    monkeypatch.setattr(demo, "run_demo", lambda out, *, entries, **options: chosen.append(entries) or Result())
    monkeypatch.setattr(demo, "write_report", lambda result, path: path)
    monkeypatch.setattr(demo, "demo_table", lambda result: "")
    run("demo", "--out", tmp_path)
    run("demo", "--out", tmp_path, "--all-methods")
    assert [entry.label for entry in chosen[1][len(chosen[0]) :]] == ["1 + ELU", "channel softmax"]
    assert demo.OURS in chosen[0]


@COMMANDS.of("demo.out", "demo.seeds", "demo.steps")
def test_the_demo_makes_so_many_runs_of_so_many_steps(tmp_path, monkeypatch):
    from nalaformer.studies import demo
    from nalaformer.studies.demo import study

    monkeypatch.setattr(study, "milliseconds", lambda entries: dict.fromkeys(entries, (1.0, 2.0, 3.0)))
    monkeypatch.setattr(demo, "write_report", lambda result, path: path)
    whole = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda *a, **k: whole(*a, **(k | {"entries": demo.ENTRIES[:1]}), workers=1))
    assert f"report: {tmp_path / 'report.html'}" in run("demo", "--out", tmp_path, "--seeds", 1, "--steps", 2)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"pointing_softmax_seed0", "majority_softmax_seed0"}
    log = read_log(tmp_path / "runs" / "majority_softmax_seed0" / "log.jsonl")
    assert sum(row["kind"] == "step" for row in log) == 2
