"""Learning to make images: the loss, what held-out images say, samples that the data judges, and runs that make images."""

import json
from dataclasses import fields

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from helpers.option_effects import Effects, options_of_command
from nalaformer import NaLaDiTPipeline, cli
from nalaformer.data.generation import GenerationDataConfig, encode_images
from nalaformer.models.diffusion import OBJECTIVES
from nalaformer.recipes import RECIPES, build_model, changed, evaluate_run, grid_of, load_pipeline, load_run, make_trainer
from nalaformer.tasks import Generation, GenerationConfig
from nalaformer.training import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

OWN = [
    field.name for field in fields(GenerationConfig) if field.name not in {each.name for each in fields(GenerationDataConfig)}
]
GENERATION = Effects(OWN)
COMMAND = Effects(options_of_command("generate", "images"))
SHORT = (
    *('model_options={"depth": 1, "dim": 16, "num_heads": 2}', "steps=2", "warmup=0", "batch_size=4", "train_samples=8"),
    *("eval_samples=6", "judged=0", "judged_steps=2", "device=cpu", "eval_every=0"),
)


def test_no_setting_of_generation_is_without_a_test_of_its_effect():
    assert [*GENERATION.missing(), *COMMAND.missing()] == []


def test_defaults_of_generation_are_those_that_figures_were_measured_with():
    config = GenerationConfig(data="d")
    assert {name: getattr(config, name) for name in OWN} == {
        "objective": "flow",
        "levels": "uniform",
        "judged": 0,
        "judged_steps": 50,
        "judged_guidance": 1.0,
    }


def task_of(**settings):
    return Generation(GenerationConfig(**({"data": "shapes", "train_samples": 8, "eval_samples": 8} | settings)))


def model_for(task, **options):
    torch.manual_seed(0)
    network = task.create_model("dit_s8", {"depth": 1, "dim": 16, "num_heads": 2} | options, task.facts())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return network


# ---- loss and held-out errors


@GENERATION.of("objective")
@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_the_loss_is_that_of_the_objective(objective):
    task = task_of(objective=objective)
    model = model_for(task)
    assert model.out_channels == (6 if objective == "ddpm" else 3)
    images, labels = torch.stack([task.train_data[i][0] for i in range(4)]), torch.arange(4)
    model.eval()
    torch.manual_seed(3)
    loss = task.loss(model, (images, labels))
    torch.manual_seed(3)
    noise, levels = torch.randn_like(images), torch.rand(4)
    errors = OBJECTIVES[objective].errors(model, images, labels, noise, levels)
    assert loss.weight == 4
    torch.testing.assert_close(loss.total, errors.loss.mean())
    torch.testing.assert_close(loss.parts["error"], errors.error.mean())
    loss.total.backward()
    assert model.pixels.weight.grad.abs().amax(1).min() > 0


@GENERATION.of("levels")
def test_levels_are_uniform_or_gather_in_the_middle():
    images, labels = torch.zeros(4000, 3, 8, 8), torch.zeros(4000, dtype=torch.long)
    shares = []
    for levels in ("uniform", "middle"):
        seen = []
        task_of(levels=levels).loss(lambda noisy, times, labels, seen=seen: seen.append(times) or noisy, (images, labels))
        shares.append(((seen[0] > 250) & (seen[0] < 750)).float().mean().item())
    # of a normal number, 72.8% lie between -log 3 and log 3; four standard deviations of 4000 draws
    assert shares == [pytest.approx(0.5, abs=0.032), pytest.approx(0.728, abs=0.03)]


@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_a_network_that_predicts_zero_explains_nothing(objective):
    task = task_of(objective=objective)
    # as it starts
    network = build_model(changed(RECIPES["shapes_dit_tiny"](), [*SHORT, f"objective={objective}"]), task.facts())
    figures = evaluate(network, task.eval_data, task.metrics(), batch_size=4)
    assert next(iter(figures)) == "explained"
    assert figures["explained"] == pytest.approx(0.0, abs=1e-6)


def test_held_out_figures_do_not_depend_on_batches_and_repeat():
    task = task_of(eval_samples=7)
    model = model_for(task)
    whole, parts = (evaluate(model, task.eval_data, task.metrics(), batch_size=size) for size in (7, 2))
    assert whole == pytest.approx(parts, rel=1e-4)
    assert set(whole) == {"explained", "loss", "error_0_25", "error_25_50", "error_50_75", "error_75_100"}
    assert whole["loss"] != evaluate(model_for(task, depth=2), task.eval_data, task.metrics(), batch_size=7)["loss"]


def test_noise_of_held_out_images_is_theirs_alone():
    data = task_of().eval_data
    first, again, other = data[1], data[1], data[2]
    assert torch.equal(first[2], again[2])
    assert first[3] == again[3]
    assert not torch.equal(first[2], other[2])


def test_errors_are_told_by_noise_level():
    task = task_of(eval_samples=64)

    def knows_noise(images, times, labels):
        # all that it knows is noise: at level 1 that is nearly all there is
        return images

    class Model(torch.nn.Module):
        forward = staticmethod(knows_noise)

    figures = evaluate(Model(), task.eval_data, task.metrics(), batch_size=64)
    by_level = [figures[f"error_{start}_{start + 25}"] for start in (0, 25, 50, 75)]
    assert by_level == sorted(by_level, reverse=True)
    levels = torch.tensor([task.eval_data[index][3] for index in range(64)])
    # even over the levels: each sixteenth has three to five of 64
    assert set(torch.histc(levels, 16, 0, 1).tolist()) <= {3.0, 4.0, 5.0}


# ---- samples


@GENERATION.of("judged", "judged_steps", "judged_guidance")
def test_samples_of_the_first_held_out_labels_are_judged(monkeypatch):
    task = task_of(judged=3, judged_steps=2)
    model = model_for(task)
    seen, calls = [], []
    data = task.eval_data.data
    monkeypatch.setattr(type(data), "judge", staticmethod(lambda i, y: seen.append((i, y)) or {"good": 0.5}), raising=False)
    plain = model.predict
    monkeypatch.setattr(model, "predict", lambda *inputs: calls.append(len(inputs[0])) or plain(*inputs))
    figures = evaluate(model, task.eval_data, task.metrics(), batch_size=2)
    assert figures["good"] == 0.5
    ((images, labels),) = seen
    assert (images.shape, images.dtype) == ((3, 3, 32, 32), torch.uint8)
    assert labels.tolist() == [data[index][1] for index in range(3)]
    # each from noise of its own
    assert (images[0].float() - images[1].float()).abs().mean() > 20
    # of eight images in batches of two, three are also sampled, in two steps
    assert sorted(calls) == [1, 1, 2, 2, 2, 2, 2, 2]
    # another cut into batches, the same samples
    evaluate(model, task.eval_data, task.metrics(), batch_size=8)
    assert (seen[1][0].int() - images.int()).abs().max() <= 1
    calls.clear()
    guided = task_of(judged=3, judged_steps=2, judged_guidance=2.0)
    evaluate(model, guided.eval_data, guided.metrics(), batch_size=8)
    assert calls == [8, 6, 6]
    assert not torch.equal(seen[2][0], seen[1][0])


def test_data_that_cannot_judge_is_refused_before_the_run(tmp_path):
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "0.png")
    with pytest.raises(ValueError, match=r"judged=4 needs data that judges samples, such as shapes"):
        task_of(data=str(tmp_path), image_size=8, judged=4).facts()
    facts = task_of(data=str(tmp_path), image_size=8).facts()
    assert (facts["num_classes"], facts["class_names"], facts["height"]) == (2, ["a", "b"], 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "flw"}, "unknown objective 'flw'"),
        ({"levels": "midle"}, "unknown noise levels 'midle'; did you mean 'middle'"),
        ({"judged": -1}, "judged must not be negative"),
        ({"judged_steps": 0}, "judged_steps must be positive"),
        ({"judged_steps": 1001}, "judged_steps must lie in 1 .. 1000, got 1001"),
        ({"judged_guidance": -1.0}, "judged_guidance must not be negative"),
        ({"judged": 0.5}, "judged must be a whole number"),
        ({"train_samples": 0}, "train_samples must be positive"),
    ],
)
def test_settings_of_generation_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig(data="shapes", **settings)


def test_a_model_that_does_not_fit_the_data_is_refused():
    task = task_of()
    with pytest.raises(ValueError, match="multiples of the patch size, 5, got 32 x 32"):
        model_for(task, patch_size=5)
    recipe = changed(RECIPES["shapes_dit_tiny"](), ['model_options={"channels": 4}'])
    with pytest.raises(ValueError, match="multiple values for keyword argument 'channels'"):
        build_model(recipe, task.facts())


# ---- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "shapes"
    make_trainer(changed(RECIPES["shapes_dit_tiny"](), [*SHORT, "judged=2"]), folder).fit()
    return folder


def test_a_run_is_evaluated_as_in_training(run):
    figures = evaluate_run(run, device="cpu").metrics
    logged = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    assert logged["kind"] == "eval"
    assert {name: logged[name] for name in figures} == pytest.approx(figures, abs=1e-5)
    assert {"explained", "valid", "asked_and_valid"} <= set(figures)


def test_the_pipeline_of_a_run_has_its_averaged_weights(run, tmp_path):
    pipeline, loaded = load_pipeline(run, device="cpu"), load_run(run)
    weights = pipeline.transformer.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in loaded.model.state_dict().items())
    config = pipeline.transformer.config
    assert (config.objective, config.height, list(config.class_names)) == ("flow", 32, loaded.facts["class_names"])
    pipeline.save_pretrained(tmp_path)
    again = load_pipeline(tmp_path, device="cpu")
    assert isinstance(again, NaLaDiTPipeline)
    assert torch.equal(again.sample(["ring"], steps=1), pipeline.sample(["ring"], steps=1))


PUBLISHED = {
    **{"patches": "x_embedder.proj", "classes": "y_embedder.embedding_table", "pixels": "final_layer.linear"},
    **{"time.0": "t_embedder.mlp.0", "time.2": "t_embedder.mlp.2", "last_modulation.linear": "final_layer.adaLN_modulation.1"},
    **{"blocks.0.attention.qkvg": "blocks.0.attn.qkv", "blocks.0.attention.projection": "blocks.0.attn.proj"},
    **{"blocks.0.modulation.linear": "blocks.0.adaLN_modulation.1"},
    **{f"blocks.0.fc{number}": f"blocks.0.mlp.fc{number}" for number in (1, 2)},
}


def test_published_weights_start_a_run(tmp_path):
    recipe = changed(RECIPES["shapes_dit_tiny"](), [*SHORT, "attention=softmax"])
    weights = {}
    for name, value in build_model(recipe, task_of().facts()).state_dict().items():
        module, _, part = name.rpartition(".")
        weights[f"{PUBLISHED[module]}.{part}"] = torch.full_like(value, 0.125)
    torch.save(weights, tmp_path / "dit.pt")
    trainer = make_trainer(changed(recipe, [f"initial_weights={tmp_path / 'dit.pt'}"]), tmp_path / "run")
    assert all((value == 0.125).all() for value in trainer.model.state_dict().values())
    assert f"{len(weights)} of {len(weights)} tensors start from" in trainer.notes[0]


def test_images_of_a_grid_lie_row_by_row():
    images = torch.stack([torch.full((3, 2, 4), value, dtype=torch.uint8) for value in (10, 20, 30)])
    grid = np.asarray(grid_of(images, columns=2, gap=1))
    assert grid.shape == (7, 11, 3)
    assert [int(grid[row, column, 0]) for row, column in ((1, 1), (1, 6), (4, 1), (4, 6), (0, 0))] == [10, 20, 30, 255, 255]


# ---- the command


def call(*arguments, fails=None):
    done = CliRunner().invoke(cli.build_app(), ["generate", "images", *map(str, arguments)])
    if fails is None:
        assert done.exit_code == 0, f"{done.output} {done.exception!r}"
        return done.output
    assert fails in str(done.exception), done.output
    return ""


@pytest.fixture
def drawn(run, tmp_path):
    """Images of the command, as an array, with their labels."""

    def draw(*arguments):
        out = tmp_path / "samples.npz"
        call("--run", run, "--out", out, "--device", "cpu", *arguments)
        with np.load(out) as content:
            return content["images"], content["labels"].tolist()

    return draw


@COMMAND.of("run", "out", "label", "count")
def test_the_command_draws_a_row_for_each_label(run, tmp_path, drawn):
    said = call("--run", run, "--label", "circle", "--label", "2", "--count", 3, "--steps", 1, "--device", "cpu")
    assert f"6 images of 2 labels: {run / 'samples.png'}" in said
    assert Image.open(run / "samples.png").size == (3 * 34 + 2, 2 * 34 + 2)
    images, labels = drawn("--label", "circle", "--label", "2", "--count", "3", "--steps", "1")
    assert (images.shape, images.dtype, labels) == ((6, 32, 32, 3), np.uint8, [0, 0, 0, 2, 2, 2])
    assert drawn("--count", "1", "--steps", "1")[1] == [0, 1, 2, 3, 4]
    call("--run", run, "--out", tmp_path / "a.jpg", fails="--out must end in .png, a grid, or .npz")
    call("--run", run, "--count", 0, fails="--count must be positive, got 0")
    call("--run", run, "--label", "circel", fails="unknown label 'circel'; did you mean 'circle'")
    call("--run", run, "--label", "9", fails="labels must lie in 0 .. 4, or 5 for no class, got 9 .. 9")


@COMMAND.of("seed", "steps", "guidance", "sampler")
def test_options_of_sampling_change_the_images(run, drawn):
    usual = ("--label", "ring", "--count", "2", "--steps", "3")
    images = drawn(*usual)[0]
    assert np.array_equal(images, drawn(*usual)[0])
    # two steps of training teach little about classes: usual guidance is less than a level of grey
    for change in (("--seed", "1"), ("--steps", "2"), ("--guidance", "400"), ("--sampler", "flow_heun")):
        assert not np.array_equal(images, drawn(*usual, *change)[0]), change
    call("--run", run, "--sampler", "ddim", fails="flow needs one of its samplers, flow_euler, flow_heun, got ddim")


@COMMAND.of("height", "width")
def test_the_command_draws_rectangles(run, drawn):
    images, _ = drawn("--label", "0", "--count", "1", "--steps", "1", "--height", "8", "--width", "20")
    assert images.shape == (1, 8, 20, 3)
    call("--run", run, "--height", 9, fails="multiples of the patch size, 2, got 9 x 32; the nearest is 8 x 32")


@COMMAND.of("device")
def test_the_command_runs_on_the_device_asked_for(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call("--run", run, "--device", "cuda", fails="device=cuda needs a CUDA device")


@COMMAND.of("autoencoder")
def test_a_run_on_latents_needs_their_autoencoder(tmp_path):
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1}
    for name in ("vae", "another"):
        diffusers.AutoencoderKL(**blocks, **sizes, latent_channels=4).save_pretrained(tmp_path / name)
    diffusers.AutoencoderTiny().save_pretrained(tmp_path / "tiny")
    shapes = GenerationDataConfig(data="shapes", train_samples=4, eval_samples=2)
    encode_images(shapes, tmp_path / "vae", tmp_path / "latents")
    recipe = changed(RECIPES["shapes_dit_tiny"](), [*SHORT, f"data={tmp_path / 'latents'}"])
    make_trainer(recipe, tmp_path / "run").fit()
    asked = ("--run", tmp_path / "run", "--label", "0", "--count", "1", "--steps", "1", "--device", "cpu")
    call(*asked, fails="4 channels makes latents and needs the autoencoder that encoded them, got none")
    call(*asked, "--autoencoder", tmp_path / "tiny", fails="got AutoencoderTiny")
    call(*asked, "--autoencoder", tmp_path / "vae")
    assert Image.open(tmp_path / "run" / "samples.png").size == (36, 36)
    call(*asked, "--autoencoder", tmp_path / "another", fails="must be the one that encoded the run's data")


def test_a_run_that_makes_no_images_is_refused(tmp_path):
    settings = ["steps=1", "warmup=0", "batch_size=4", "train_samples=4", "eval_samples=4", "device=cpu"]
    make_trainer(changed(RECIPES["cue_grid"](), settings), tmp_path / "run").fit()
    call("--run", tmp_path / "run", fails="images are made by a run that has learned to, such as shapes_dit_tiny")
