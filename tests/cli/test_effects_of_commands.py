"""Every option of the commands that make data, train, use what was trained, and look at attention."""

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch.utils.data import Subset
from typer.testing import CliRunner

from helpers.option_effects import Effects
from nalaformer import cli, op_bench
from nalaformer.analysis import methods
from nalaformer.data import CueGrid
from nalaformer.data.segmentation.masks import read_mask
from nalaformer.data.text import Tales, TokenShards, fingerprint, load_tokenizer, train_tokenizer
from nalaformer.op_bench import Timing
from nalaformer.recipes import RECIPES, evaluate_run, load_run, predict
from nalaformer.tasks import Answer, Classification
from nalaformer.training import Checkpoints
from nalaformer.training.log import read_log

pytestmark = pytest.mark.usefixtures("one_thread")

# their options are seen to with what they do: linearization, language models, samples, published weights, maps
ELSEWHERE = (
    *("linearize", "generate", "eval language", "eval images", "data encode", "data unpack", "convert"),
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
    shown = run("recipes")
    assert all(name in shown for name in RECIPES.names())


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


@COMMANDS.of("eval run.settings")
def test_eval_takes_settings_of_the_task(image_run):
    shown = run("eval", image_run, "eval_samples=5", "--device", "cpu")
    assert figure(shown, "images") == "5"
    run("eval", "run", image_run, "data_seed=3", "--device", "cpu")
    run("eval", image_run, "learning_rate=3", "--device", "cpu", fails="unknown key 'learning_rate'")


@COMMANDS.of("eval run.split")
def test_eval_looks_at_the_split_that_is_asked_for(image_run, monkeypatch):
    # no task of the library has a third split
    five = property(lambda task: Subset(task.eval_data, range(5)))
    monkeypatch.setattr(Classification, "test_data", five, raising=False)
    for split, images in (("val", 12), ("test", 5)):
        assert figure(run("eval", image_run, "--split", split, "--device", "cpu"), "images") == str(images)
    run("eval", image_run, "--split", "train", fails='"val" or "test"')


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
    monkeypatch.setattr(Classification, "has_pictures", True)


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


@COMMANDS.of("predict.json_file", "predict.csv_file")
def test_predict_writes_the_probabilities_that_it_finds(image_run, tmp_path):
    (path,) = CueGrid(split="val", samples=1, cells=8).write(tmp_path / "images").rglob("*.png")
    (tmp_path / "images" / "x.png").write_bytes(b"nothing")
    files = ("--json", tmp_path / "new" / "a.json", "--csv", tmp_path / "a.csv")
    done = CliRunner().invoke(
        cli.build_app(), [str(part) for part in ("predict", tmp_path / "images", "--run", image_run, *files, "--set", "most=0")]
    )
    assert done.exit_code == 1
    assert f"answers: {tmp_path / 'a.csv'}" in done.output
    (prediction,) = predict([path], image_run, options=["most=0"])
    assert sum(value for _, value in prediction.answer.values) == pytest.approx(1)
    expected = [{"class": name, "probability": value} for name, value in prediction.answer.values]
    content = json.loads((tmp_path / "new" / "a.json").read_text())
    assert content["step"] == load_run(image_run).step
    assert [image for image in content["images"] if "error" not in image] == [{"image": str(path), "answers": expected}]
    assert ["no image" in image["error"] for image in content["images"] if "error" in image] == [True]
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["class"], float(row["probability"])) for row in rows if row["class"]] == [
        (str(path), each["class"], each["probability"]) for each in expected
    ]
    assert [row["image"] for row in rows if row["error"]] == [str(tmp_path / "images" / "x.png")]


def test_predict_names_as_many_classes_as_are_asked_for(image_run, tmp_path):
    (path,) = CueGrid(split="val", samples=1, cells=8).write(tmp_path / "images").rglob("*.png")
    shown = run("predict", path, "--run", image_run)
    assert "fourth" in shown
    assert "fifth" not in shown
    assert "third" not in run("predict", path, "--run", image_run, "--set", "most=2")
    run("predict", path, "--run", image_run, "--set", "most=-1", fails="most must not be negative")


def test_what_a_task_cannot_write_is_refused_before_it_is_asked(image_run, tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    asked = ("predict", tmp_path / "a.png", "--run", image_run)
    run(
        *asked,
        "--out",
        tmp_path / "a.csv",
        fails=f"--out is for pictures, got {tmp_path / 'a.csv'}; write the answers by --csv",
    )
    run(*asked, "--out", tmp_path / "b", fails="draws none; write its answers by --json FILE or --csv FILE")
    run(*asked, "--coco", tmp_path / "a.json", fails="--coco is for runs of detection, got one of classification")
    run(*asked, "--label-maps", tmp_path, fails="--label-maps is for runs of segmentation, got one of classification")
    run(*asked, "--annotations", tmp_path / "a.json", fails="add --coco FILE")
    run(*asked, "--json", tmp_path, fails="must be a file to write, got a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@COMMANDS.of("predict.coco", "predict.annotations")
def test_predict_writes_objects_with_the_ids_of_the_annotations(tmp_path, monkeypatch):
    backbone = {"embed_dims": [16] * 4, "depths": [1] * 4, "num_heads": [1] * 4, "mlp_ratios": 1}
    options = backbone | {"channels": 16, "smallest_anchor": 12, "head_norm": True, "head_layers": 1}
    few = ["steps=1", "warmup=0", "batch_size=2", "train_samples=2", "eval_samples=2", "eval_every=0", "save_every=0"]
    settings = [*few, f"model_options={json.dumps(options)}", f"generated_folder={tmp_path}", "device=cpu"]
    run("train", "shapes_retinanet", *settings, "--out", tmp_path / "run")
    found = {"boxes": torch.tensor([[1.0, 2, 11, 22]]), "labels": torch.tensor([2]), "scores": torch.tensor([0.75])}
    monkeypatch.setattr("nalaformer.tasks.detection.find_objects", lambda *_, **__: found)
    folder = Path(load_run(tmp_path / "run").task.folder)
    asked = ("predict", folder / "val", "--run", tmp_path / "run", "--coco", tmp_path / "coco.json")
    run(*asked, "--csv", tmp_path / "a.csv")
    expected = {"category_id": 3, "bbox": [1, 2, 10, 20], "score": 0.75}
    results = json.loads((tmp_path / "coco.json").read_text())
    names = ("000000.png", "000001.png")
    assert results == [{"image_id": i + 1, **expected, "file_name": name} for i, name in enumerate(names)]
    assert "triangle,0.75,1.0,2.0,11.0,22.0" in (tmp_path / "a.csv").read_text()
    file = folder / "annotations" / "instances_val.json"
    text = file.read_text().replace('"id": 3, "name": "triangle"', '"id": 44, "name": "triangle"')
    (tmp_path / "ids.json").write_text(text)
    run(*asked, "--annotations", tmp_path / "ids.json")
    results = json.loads((tmp_path / "coco.json").read_text())
    assert [(each["image_id"], each["category_id"]) for each in results] == [(0, 44), (1, 44)]
    (tmp_path / "ids.json").write_text(text.replace("000001.png", "other.png"))
    run(*asked, "--annotations", tmp_path / "ids.json", fails="must list every image that is asked about")


@COMMANDS.of("predict.label_maps")
def test_predict_writes_the_class_of_each_pixel(tmp_path):
    options = {"embed_dims": [8] * 4, "depths": [1] * 4, "num_heads": [1] * 4, "mlp_ratios": 1.0, "decoder_channels": 64}
    few = ["steps=1", "warmup=0", "batch_size=2", "train_samples=2", "eval_samples=1", "crop=32", "short_side=48"]
    settings = [*few, "eval_every=0", "save_every=0", "device=cpu", f"generated_folder={tmp_path}"]
    run("train", "scenes", *settings, f"model_options={json.dumps(options)}", "--out", tmp_path / "run")
    (path,) = (load_run(tmp_path / "run").task.folder / "images" / "validation").iterdir()
    said = run("predict", path, "--run", tmp_path / "run", "--label-maps", tmp_path / "maps", "--json", tmp_path / "a.json")
    (prediction,) = predict([path], tmp_path / "run")
    written = tmp_path / "maps" / f"{path.stem}.png"
    assert f"label maps: {tmp_path / 'maps'}" in said
    # as masks are read: the numbers of a palette
    assert np.array_equal(read_mask(written), prediction.answer.values)
    (image,) = json.loads((tmp_path / "a.json").read_text())["images"]
    assert image["label_map"] == str(written)
    assert Path(image["picture"]).is_file()
    assert sum(answer["share"] for answer in image["answers"]) == pytest.approx(1)
    # the same run has something to say of each class
    shown = run("eval", tmp_path / "run", "--device", "cpu")
    ious = [float(line.split("│")[2]) for line in shown.splitlines() if "iou, " in line]
    assert float(figure(shown, "miou")) == pytest.approx(sum(ious) / len(ious), rel=1e-2)
    assert len(ious) == 7 - int(figure(shown, "classes_left_out"))


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


@COMMANDS.of("train.dry_run", "tokenize.dry_run")
def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tmp_path):
    texts = tmp_path / "a.txt"
    texts.write_text("a text")
    said = run("train", "cue_grid", "steps=6", "batch_size=8", "--out", tmp_path / "run", "--dry-run")
    assert "cue_grid: 6 steps of 8" in said
    said = run("tokenize", texts, "--train-vocab", "300", "--out", tmp_path / "tokens", "--dry-run")
    assert "train: 1 files" in said
    assert "tokenizer: trained, 300 entries" in said
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
    monkeypatch.setattr("nalaformer.analysis.compare.time_call", lambda phi: 1.0)
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


# ---- this machine


@COMMANDS.of(*(f"bench.{name}" for name in ("tokens", "heads", "head_dim", "feature_map", "causal", "backward", "seconds")))
def test_bench_times_the_rows_that_are_asked_for(monkeypatch):
    asked = []

    def measured(tokens, **options):
        asked.append((tokens, options))
        return Timing(linear_ms=2.0, softmax_ms=3.0)

    monkeypatch.setattr(op_bench, "compare_with_softmax", measured)
    usual = {"heads": 4, "head_dim": 64, "feature_map": "norm_aware", "causal": False, "backward": False}
    run("bench", "--device", "cpu")
    assert asked == [(tokens, usual | {"device": "cpu", "seconds": 0.5}) for tokens in (256, 1024, 4096, 16_384)]
    asked.clear()
    shape = ("--heads", 2, "--head-dim", 16, "--feature-map", "relu", "--causal", "--backward")
    shown = run("bench", "--tokens", 32, "--tokens", 48, *shape, "--seconds", 0.1, "--device", "cpu")
    chosen = {"heads": 2, "head_dim": 16, "feature_map": "relu", "causal": True, "backward": True}
    assert asked == [(tokens, chosen | {"device": "cpu", "seconds": 0.1}) for tokens in (32, 48)]
    assert "2 heads of 16, relu, cpu" in shown
    assert [line.split("│")[4].strip() for line in shown.splitlines() if "│" in line] == ["1.50", "1.50"]


@COMMANDS.of("bench.device")
def test_bench_without_its_device_is_refused(no_gpu):
    run("bench", "--device", "cuda", fails="needs a CUDA device")
