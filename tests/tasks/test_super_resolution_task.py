"""Enlarging images: metrics as papers define them, and runs from training to pictures."""

import io
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from skimage.color import rgb2ycbcr
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch import nn
from typer.testing import CliRunner

from helpers.option_effects import Effects
from helpers.training_example import stop_at
from nalaformer.cli import build_app
from nalaformer.cli import predict as cli_predict
from nalaformer.data.super_resolution import enlarge, to_eight_bits
from nalaformer.recipes import Recipe, answers_of, build_model, changed, evaluate_run, load_run, make_trainer, predict
from nalaformer.tasks import ImageQuality, SuperResolutionConfig, SuperResolutionTask
from nalaformer.tasks.image_quality import luma, psnr, ssim
from nalaformer.tasks.super_resolution import SuperResolutionAnswers, enlarge_in_tiles, spans
from nalaformer.training import TrainingConfig, evaluate

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG, ANSWERS = (Effects(field.name for field in fields(kind)) for kind in (SuperResolutionConfig, SuperResolutionAnswers))


def test_no_setting_is_without_a_test_of_its_effect():
    assert [*CONFIG.missing(), *ANSWERS.missing()] == []


# ---- metrics


def noisy(strength, seed=0, shape=(3, 33, 40)):
    """An image with structure, and the same with noise: uint8 [3, H, W]."""
    random = np.random.default_rng(seed)
    smooth = enlarge(torch.from_numpy(random.uniform(size=(shape[0], shape[1] // 4 + 1, shape[2] // 4 + 1))), 4)
    clean = smooth[:, : shape[1], : shape[2]]
    return tuple(to_eight_bits(image) for image in (clean + strength * torch.from_numpy(random.normal(size=shape)), clean))


@pytest.mark.parametrize("strength", [0.001, 0.05, 0.4])
def test_figures_are_those_of_scikit_image(strength):
    found, wanted = (luma(image) for image in noisy(strength))
    reference = [rgb2ycbcr(image.permute(1, 2, 0).numpy())[..., 0] for image in noisy(strength)]
    assert np.allclose(wanted.numpy(), reference[1], atol=1e-9)
    assert psnr(found, wanted) == pytest.approx(peak_signal_noise_ratio(*reversed(reference), data_range=255), abs=1e-9)
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
    assert ssim(found, wanted) == pytest.approx(structural_similarity(*reference, **options), abs=1e-9)


def test_an_image_is_like_itself():
    image = luma(noisy(0.1)[0])
    assert (psnr(image, image), ssim(image, image)) == (100.0, pytest.approx(1, abs=1e-12))


class Enlarged(nn.Module):
    """Bicubic interpolation and an error in every second column."""

    def __init__(self, scale, error=0.0):
        super().__init__()
        self.scale, self.error = scale, nn.Parameter(torch.tensor(error))

    def forward(self, low):
        large = torch.stack([enlarge(image, self.scale) for image in low])
        return large + self.error * (torch.arange(large.shape[3]) % 2)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_images_count_alike_after_rounding_and_without_their_border(scale):
    batch = []
    for seed, side in ((0, 12), (1, 15)):
        low = noisy(0.02, seed, (3, side, 11))[0]
        high = to_eight_bits(enlarge(low / 255, scale) + 0.1 * torch.rand(3, scale * side, scale * 11))
        # what is wrong at the border alone does not count
        high[:, :scale], high[..., -scale:] = 255, 0
        batch.append((low, high))
    metrics = ImageQuality(scale)
    with torch.no_grad():
        metrics.update(Enlarged(scale, 0.03), batch)
    expected = []
    for low, high in batch:
        found = to_eight_bits(Enlarged(scale, 0.03)(low[None] / 255)[0].detach())
        inside = [luma(image)[scale:-scale, scale:-scale].numpy() for image in (high, found)]
        expected.append(peak_signal_noise_ratio(*inside, data_range=255))
    result = metrics.result()
    assert result["psnr"] == pytest.approx(np.mean(expected), abs=1e-9)
    assert result["images"] == 2
    assert result["psnr"] != pytest.approx(result["bicubic_psnr"], abs=0.01)
    plain = ImageQuality(scale)
    plain.update(Enlarged(scale).requires_grad_(False), batch)
    # interpolation beside itself
    figures = plain.result()
    assert (figures["psnr"], figures["ssim"]) == (figures["bicubic_psnr"], figures["bicubic_ssim"])
    assert figures["bicubic_psnr"] == result["bicubic_psnr"]


def test_figures_over_several_processes_are_those_over_one():
    batch = [noisy(0.1, seed, (3, 2 * 16, 2 * (14 + seed))) for seed in range(5)]
    pairs = [(high[:, ::2, ::2].contiguous(), high) for high, _ in batch]
    model = Enlarged(2, 0.02).requires_grad_(False)
    alone, first, second = (ImageQuality(2) for _ in range(3))
    alone.update(model, pairs)
    first.update(model, pairs[::2])
    second.update(model, pairs[1::2])
    own = [first.sums.clone(), second.sums.clone()]
    for metrics in (first, second):
        metrics.join(lambda _: own)
        assert metrics.result() == pytest.approx(alone.result(), rel=1e-12)


def test_figures_of_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one image"):
        ImageQuality(2).result()


def test_the_loss_is_the_mean_absolute_error():
    low, high = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    task = SuperResolutionTask(SuperResolutionConfig(data="none"))
    loss = task.loss(Enlarged(2, 0.1), (low, high))
    # every second column has 0.1, and all should have 0.2
    assert (loss.total.item(), loss.weight) == (pytest.approx(0.15), 2)


# ---- settings


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Five images of 40 x 36 pixels, two of them for evaluation."""
    folder = tmp_path_factory.mktemp("photographs")
    for number in range(5):
        path = folder / ("val" if number > 2 else "train") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy(0, number, (3, 36, 40))[1].permute(1, 2, 0).numpy()).save(path)
    return folder


def recipe_of(data, *settings, **task):
    config = SuperResolutionConfig(**({"data": str(data), "patch_size": 16, "patches_per_image": 8} | task))
    return changed(
        Recipe(
            model="super_resolution_tiny",
            attention="linear",
            model_options={"embed_dim": 16, "depths": [1], "skip": "bicubic"},
            task=config,
            training=TrainingConfig(steps=4, batch_size=4, learning_rate=5e-3, weight_decay=0.0, device="cpu"),
        ),
        list(settings),
    )


@CONFIG.of("data", "generated_folder", "train_samples", "eval_samples", "image_size", "data_seed")
def test_images_are_those_of_a_folder_or_generated(photographs, tmp_path):
    task = SuperResolutionTask(SuperResolutionConfig(data=str(photographs)))
    assert [len(task.pairs(split)) for split in ("train", "val")] == [3, 2]
    config = SuperResolutionConfig(
        data="scenes", generated_folder=str(tmp_path), train_samples=2, eval_samples=1, image_size=32, patches_per_image=3
    )
    zero, one = (SuperResolutionTask(replace(config, data_seed=seed)) for seed in (0, 1))
    assert (len(zero.train_data), len(zero.eval_data)) == (6, 1)
    assert zero.eval_data[0][1].shape == (3, 32, 32)
    assert zero.folder.parent == tmp_path
    assert not torch.equal(zero.eval_data[0][1], one.eval_data[0][1])


@CONFIG.of("scale", "patch_size", "patches_per_image", "eval_crop", "kept_mib")
def test_samples_have_the_sizes_that_are_asked_for(photographs):
    for scale, patch, crop, count in ((2, 16, 0, 1), (3, 20, 33, 4)):
        config = SuperResolutionConfig(
            data=str(photographs), scale=scale, patch_size=patch, patches_per_image=count, eval_crop=crop, kept_mib=count
        )
        task = SuperResolutionTask(config)
        assert len(task.train_data) == 3 * count
        low, high = task.train_data[0]
        assert low.shape == (3, patch // scale, patch // scale)
        assert high.shape[1] == patch // scale * scale
        assert task.eval_data[0][1].shape[1:] == ((crop, crop) if crop else (36, 40))
        assert task.pairs("val").room == count * 2**20
        model = task.create_model("super_resolution_tiny", {}, task.facts())
        assert model(low[None] / 255).shape[2:] == high.shape[1:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 5}, "scale must be 2, 3 or 4"),
        ({"patch_size": 1}, "patch_size must be at least the scale, 2"),
        ({"eval_crop": 12}, "eval_crop must be 0 or at least 16"),
        ({"patches_per_image": 0}, "patches_per_image must be positive"),
        ({"kept_mib": -1}, "kept_mib must not be negative"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SuperResolutionConfig(data="none", **settings)


def test_networks_of_all_scales_share_their_backbone():
    two, three = (build_model(recipe_of("none"), {"scale": scale}) for scale in (2, 3))
    SuperResolutionTask.backbone(three).load_state_dict(SuperResolutionTask.backbone(two).state_dict())


# ---- runs


def test_a_small_network_learns_a_handful_of_images_by_heart(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(4):
            # sharp steps of 30 to 225 between squares of two pixels, which interpolation blurs
            squares = np.random.default_rng(number).choice((30, 95, 160, 225), (12, 12)).astype(np.uint8)
            pixels = squares.repeat(2, axis=0).repeat(2, axis=1)
            Image.fromarray(pixels).convert("RGB").save(tmp_path / split / f"{number}.png")
    recipe = recipe_of(tmp_path, "steps=120", "learning_rate=1e-2", "warmup=10", "clip_norm=1", patch_size=24)
    metrics = make_trainer(recipe, tmp_path / "run").fit().metrics
    assert metrics["bicubic_psnr"] < 22
    assert metrics["psnr"] > 30


def test_a_resumed_run_ends_with_the_same_bits(photographs, tmp_path):
    recipe = recipe_of(photographs, "steps=6", "ema=0.9", "save_every=3")
    whole = make_trainer(recipe, tmp_path / "whole")
    whole.fit()
    stopped = make_trainer(recipe, tmp_path / "stopped")
    stop_at(stopped, 3)
    assert stopped.fit().step == 3
    resumed = make_trainer(recipe, tmp_path / "stopped")
    resumed.fit()
    for one, other in ((whole.model, resumed.model), (whole.ema.module, resumed.ema.module)):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    assert whole.progress.metrics == resumed.progress.metrics


def test_a_run_is_evaluated_as_it_was_trained_or_on_whole_images(photographs, tmp_path):
    outcome = make_trainer(recipe_of(photographs, eval_crop=20), tmp_path / "run").fit()
    assert evaluate_run(tmp_path / "run", device="cpu").metrics == pytest.approx(outcome.metrics)
    whole = evaluate_run(tmp_path / "run", device="cpu", settings=["eval_crop=0"]).metrics
    task = SuperResolutionTask(SuperResolutionConfig(data=str(photographs)))
    assert whole == pytest.approx(evaluate(load_run(tmp_path / "run").model, task.eval_data, task.metrics(), batch_size=1))
    assert whole["bicubic_psnr"] != pytest.approx(outcome.metrics["bicubic_psnr"])


def test_bad_images_are_counted_or_stop_the_run(photographs, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for number, path in enumerate(sorted((photographs / split).iterdir())):
            whole = path.read_bytes()
            (tmp_path / "data" / split / path.name).write_bytes(whole[:-300] if number == 1 else whole)
    recipe = recipe_of(tmp_path / "data")
    assert make_trainer(recipe, tmp_path / "run").fit().metrics["images"] == 1
    rejected = (tmp_path / "run" / "rejected.txt").read_text()
    assert "train/1.png" in rejected
    assert "val/4.png" in rejected
    with pytest.raises(RuntimeError, match=r"\.png is no image that can be used"):
        make_trainer(changed(recipe, ["on_corrupt=stop"]), tmp_path / "other").fit()


# ---- pictures


@pytest.fixture(scope="module")
def run(photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_trainer(recipe_of(photographs), folder).fit()
    return folder


def test_predict_writes_the_enlarged_image(run, photographs, tmp_path):
    source, target = photographs / "val" / "3.png", tmp_path / "large.png"
    done = CliRunner().invoke(build_app(), ["predict", str(source), "--run", str(run), "--out", str(target), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    loaded = load_run(run)
    pixels = torch.from_numpy(np.array(Image.open(source))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        expected = to_eight_bits(loaded.model(pixels)[0]).permute(1, 2, 0).numpy()
    assert expected.shape == (72, 80, 3)
    assert np.array_equal(np.array(Image.open(target)), expected)


@ANSWERS.of("tile", "overlap")
def test_tiles_are_seen_one_by_one_only_when_asked(run, photographs, monkeypatch):
    def sizes(*options):
        seen = []
        forward = type(load_run(run).model).forward
        monkeypatch.setattr(
            "nalaformer.models.vision.SuperResolution.forward",
            lambda self, image: seen.append(tuple(image.shape[2:])) or forward(self, image),
        )
        (prediction,) = predict([photographs / "val" / "3.png"], run, options=list(options), device="cpu")
        monkeypatch.undo()
        assert prediction.answer.picture.size == prediction.answer.values == (80, 72)
        return seen

    assert sizes() == sizes("tile=0") == [(36, 40)]
    assert sizes("tile=20", "overlap=0") == [(20, 20)] * 4
    assert sizes("tile=20", "overlap=16") == [(20, 20)] * 5 * 6


def test_an_image_at_work_tells_each_of_its_layers(run, photographs):
    def layers(*options):
        told = []
        asked = {"options": list(options), "device": "cpu", "advance": lambda: told.append(1)}
        assert len(list(answers_of(load_run(run), [photographs / "val" / "3.png"], **asked))) == 1
        return len(told)

    # one block
    assert (layers(), layers("tile=20", "overlap=0")) == (1, 4)


def test_a_bar_shows_the_layers_of_the_image_at_work(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(cli_predict, "make_console", lambda: Console(file=shown, force_terminal=True, width=100))
    with cli_predict.image_bar([Path("a.png"), Path("b.png")]) as (advance, advance_layer):
        advance()
        for _ in range(7):
            advance_layer()
    assert "1/2, 7 layers of the next" in shown.getvalue()


@pytest.mark.parametrize(("tile", "overlap"), [(8, 4), (9, 4), (16, 5), (50, 4)])
def test_tiles_join_to_the_whole_where_the_network_looks_no_farther(tile, overlap):
    torch.manual_seed(0)
    # 3 x 3 and then 2 x 2 pixels for each
    local = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2)).requires_grad_(False).double()
    image = torch.rand(1, 3, 23, 31, dtype=torch.float64)
    # another machine sums the convolution of another size in another order
    torch.testing.assert_close(
        enlarge_in_tiles(local, image, scale=2, tile=tile, overlap=overlap), local(image), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("length", "tile", "overlap"), [(5, 8, 2), (8, 8, 2), (9, 8, 2), (30, 8, 3), (100, 32, 16)])
def test_spans_cover_a_side_once(length, tile, overlap):
    found = spans(length, tile, overlap)
    assert [pixel for _, pixels in found for pixel in pixels] == list(range(length))
    assert all(start <= pixels.start and pixels.stop <= max(length, start + tile) for start, pixels in found)


def test_a_tile_within_the_overlap_is_refused():
    with pytest.raises(ValueError, match="larger than the overlap, got tile=16 and overlap=16"):
        SuperResolutionAnswers(tile=16)


def test_too_little_memory_names_the_remedy(photographs):
    class Hungry(Enlarged):
        def forward(self, low):
            raise torch.OutOfMemoryError("CUDA out of memory")

    task = SuperResolutionTask(SuperResolutionConfig(data=str(photographs)))
    with pytest.raises(ValueError, match=r"too little memory for 40 pixels .* --set tile=256"):
        task.answer(Hungry(2), Image.new("RGB", (40, 30)), {"scale": 2}, SuperResolutionAnswers())
