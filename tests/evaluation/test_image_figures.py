"""Figures of samples bear the name of their network, and FID is refused with any but its own. Every option of the commands."""

import hashlib
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from helpers.option_effects import Effects, options_of_command
from nalaformer import cli
from nalaformer.data import ImageFolder
from nalaformer.data.generation import SHAPES, GenerationDataConfig, as_pixels, open_generation_data
from nalaformer.evaluation.images import (
    Extractor,
    ImageSet,
    classifier_extractor,
    image_figures,
    inception_extractor,
    read_image_set,
    shape_figures,
)
from nalaformer.evaluation.images import inception as inception_module
from nalaformer.evaluation.images.inception import Inception, load_inception, resize
from nalaformer.recipes import load_run

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = Effects(
    f"{' '.join(path)}.{option}"
    for path in (("eval", "images"), ("data", "encode"), ("data", "unpack"))
    for option in options_of_command(*path)
)


def test_no_option_is_without_a_test_of_its_effect():
    assert COMMANDS.missing() == []


def run(*arguments, fails=None):
    done = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])
    if fails is None:
        assert done.exit_code == 0, f"{done.output} {done.exception!r}"
        return done.output
    assert done.exception is not None, done.output
    assert fails in str(done.exception)
    return str(done.exception)


def figure(output, name):
    """The value of a row of the table."""
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines()]
    return float(next(row[2] for row in rows if len(row) > 2 and row[1] == name))


# ---- Inception


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return {name: value for name, value in Inception().network.state_dict().items() if not name.endswith("tracked")}


@pytest.fixture(scope="module")
def inception_file(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("inception") / "mine.safetensors"
    save_file(weights, path)
    return path


def test_resizing_is_that_of_tensorflow():
    # pixel i of 5 lies at 3 i / 5: 0, 0.6, 1.2, 1.8, 2.4, and beyond the last pixel there is none
    row = torch.tensor([10.0, 20.0, 40.0])
    expected = torch.tensor([10.0, 16.0, 24.0, 36.0, 40.0])
    assert torch.allclose(resize(row.expand(1, 1, 3, 3), 5)[0, 0], expected.expand(5, 5))
    assert torch.allclose(resize(row.expand(1, 1, 3, 3).mT, 5)[0, 0], expected.expand(5, 5).mT)
    # 2 of 4: every second pixel, nothing is averaged
    assert resize(torch.arange(16.0).view(1, 1, 4, 4), 2).flatten().tolist() == [0, 2, 8, 10]


def test_features_are_those_of_the_published_pooling(weights, inception_file, monkeypatch):
    """Oracle: torchvision's forward, with the pooling of the published graph in the place of its own."""
    import torchvision.models.inception as theirs

    average = F.avg_pool2d

    def published(x, kernel_size, stride, padding):
        # the last block, alone with 2,048 channels, takes the maximum
        if x.shape[1] == 2048:
            return F.max_pool2d(x, 3, 1, 1)
        ones = torch.ones_like(x[:, :1])
        return average(x, 3, 1, 1) / average(ones, 3, 1, 1)

    images = torch.randint(0, 256, (1, 3, 40, 32), dtype=torch.uint8)
    model, is_published = load_inception(inception_file)
    assert not is_published
    found = model(images)
    network = theirs.Inception3(num_classes=1008, aux_logits=False, init_weights=False)
    network.load_state_dict(weights, strict=False)
    network.fc = torch.nn.Identity()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(theirs.F, "avg_pool2d", published)
        expected = network.eval()((resize(images.float(), 299) - 128) / 128)
    assert found.shape == (1, 2048)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-4
    # the border counts: torchvision's own pooling gives others
    with torch.no_grad():
        other = network((resize(images.float(), 299) - 128) / 128)
    assert ((found - other).norm() / other.norm()).item() > 1e-2


def test_a_file_of_another_network_is_refused_by_its_tensors(weights, tmp_path):
    imagenet = weights | {"fc.weight": torch.zeros(1000, 2048), "AuxLogits.fc.bias": torch.zeros(1000)}
    with pytest.raises(ValueError, match=r"a\.pth, which differs in 2 tensors: AuxLogits.fc.bias, fc.weight; name that file"):
        Inception().load(imagenet, "a.pth")
    torch.save({"a": torch.zeros(1)}, tmp_path / "b.pth")
    with pytest.raises(ValueError, match=r"must hold the weights of pt_inception-2015-12-05-6726825d\.pth"):
        inception_extractor(tmp_path / "b.pth")
    with pytest.raises(ValueError, match="file of weights or the folder of a classifier's run"):
        inception_extractor(tmp_path / "none.pth")


def test_only_the_published_file_gives_fid(inception_file, monkeypatch):
    other = inception_extractor(inception_file)
    assert (other.is_fid, other.name) == (False, "mine.safetensors")
    monkeypatch.setattr(inception_module, "SHA256", hashlib.sha256(inception_file.read_bytes()).hexdigest())
    assert inception_extractor(inception_file).is_fid


# ---- figures


def means(images):
    """Six features: mean and spread of each channel."""
    values = images.float().flatten(2)
    return torch.cat([values.mean(2), values.std(2)], dim=1)


def by_means(**options):
    return Extractor(**({"name": "means", "observe": lambda images: (means(images), None)} | options))


def by_brightness(images):
    """A classifier: red or blue."""
    features = means(images)
    return features, features[:, [0, 2]]


COLOURS = {"name": "colours", "observe": by_brightness, "class_names": ("red", "blue")}


def noise(count, seed=0, top=256, **options):
    random = torch.Generator().manual_seed(seed)
    return ImageSet(images=torch.randint(0, top, (count, 3, 6, 8), generator=random, dtype=torch.uint8), **options)


def test_figures_bear_the_name_of_their_network():
    found = image_figures(noise(20), noise(20, seed=1), by_means())
    titles = ["frechet distance of means", "kernel distance of means"]
    assert list(found) == [*titles, "precision in features of means", "recall in features of means"]
    published = image_figures(noise(20), noise(20, seed=1), by_means(is_fid=True), figures=["fid", "kid"])
    assert list(published) == ["FID", "KID"]
    assert published["FID"] == found["frechet distance of means"]
    assert published["KID"] == found["kernel distance of means"]


@pytest.mark.parametrize("name", ["fid", "kid"])
def test_the_name_is_refused_with_another_network(name):
    with pytest.raises(ValueError, match=f"{name.upper()} is defined by the network in pt_inception.*got means; .*or ask for"):
        image_figures(noise(20), noise(20, seed=1), by_means(), figures=[name])


def test_unknown_figures_and_accuracy_without_a_classifier_are_refused():
    with pytest.raises(ValueError, match="unknown figure 'frechett'; did you mean 'frechet'"):
        image_figures(noise(5), noise(5), by_means(), figures=["frechett"])
    with pytest.raises(ValueError, match="accuracy needs a classifier, got means"):
        image_figures(noise(5), noise(5), by_means(), figures=["accuracy"])
    with pytest.raises(ValueError, match="classes of the samples must be known"):
        image_figures(noise(5), noise(5), by_means(**COLOURS), figures=["accuracy"])


def test_samples_further_from_the_reference_get_worse_figures():
    reference = noise(60)
    near, far = (image_figures(noise(60, seed=1, top=top), reference, by_means()) for top in (256, 128))
    near, far = (list(each.values()) for each in (near, far))
    assert near[0] < 0.1 * far[0]
    assert near[1] < 0.1 * far[1]
    assert min(near[2:]) > 0.5
    assert max(far[2:]) == 0


def test_accuracy_is_the_share_that_shows_the_asked_class_by_name():
    images = torch.zeros(4, 3, 6, 8, dtype=torch.uint8)
    for place, channel in enumerate((0, 2, 2, 0)):
        images[place, channel] = 200
    # the samples number their classes the other way round
    samples = ImageSet(images=images, labels=torch.tensor([1, 0, 1, 1]), class_names=("blue", "red"))
    found = image_figures(samples, samples, Extractor(**COLOURS), figures=["accuracy"])
    assert found == {"accuracy under colours": 0.75}
    numbers = ImageSet(images=images, labels=torch.tensor([7, 10, 7, 7]))
    digits = Extractor(**(COLOURS | {"class_names": ("07", "10")}))
    assert image_figures(numbers, numbers, digits, figures=["accuracy"]) == {"accuracy under colours": 0.75}
    with pytest.raises(ValueError, match=r"must know the classes of the samples, got 10, 7; colours knows red, blue"):
        image_figures(numbers, numbers, Extractor(**COLOURS), figures=["accuracy"])


def test_a_classifier_gives_what_its_last_layer_sees():
    import timm

    torch.manual_seed(0)
    model = timm.create_model("nalaformer_xt", num_classes=3).eval()

    def prepare(image):
        return torch.from_numpy(np.array(image.resize((32, 32)))).permute(2, 0, 1) / 255

    extractor = classifier_extractor(model, prepare, class_names=["a", "b", "c"], name="xt")
    images = noise(3).images
    features, logits = extractor.run(images, batch_size=2)
    with torch.no_grad():
        batch = torch.stack([prepare(Image.fromarray(image.permute(1, 2, 0).numpy())) for image in images])
        expected = model(batch)
        assert torch.allclose(logits, expected, atol=1e-4)
        assert torch.allclose(model.get_classifier()(features), expected, atol=1e-4)
    assert extractor.class_names == ("a", "b", "c")


# ---- sets of images


def write_images(root, names, size=(8, 6)):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number, 0, 0)).save(root / name)


def test_sets_come_from_folders_with_and_without_classes(tmp_path):
    write_images(tmp_path / "flat", ["b.png", "a.png"])
    flat = read_image_set(tmp_path / "flat")
    assert (flat.images.shape, flat.labels) == ((2, 3, 6, 8), None)
    assert flat.images[:, 0, 0, 0].tolist() == [1, 0]
    write_images(tmp_path / "classes", ["val/b/1.png", "val/a/2.png", "val/b/0.png", "train/a/1.png"])
    val, train = (read_image_set(tmp_path / "classes", split=split) for split in ("val", "train"))
    assert (val.names(), val.images[:, 0, 0, 0].tolist()) == (["a", "b", "b"], [1, 2, 0])
    assert train.names() == ["a"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must hold at least one"):
        read_image_set(tmp_path / "empty")
    with pytest.raises(ValueError, match='split must be "train" or "val"'):
        read_image_set(tmp_path / "flat", split="test")


def test_images_of_several_sizes_need_a_size(tmp_path):
    write_images(tmp_path, ["a.png"])
    write_images(tmp_path, ["b.png"], size=(9, 6))
    with pytest.raises(ValueError, match=r"b\.png cannot be used: .*one size, got 8 x 6 and 9 x 6; give a size"):
        read_image_set(tmp_path)
    assert read_image_set(tmp_path, size=5).images.shape == (2, 3, 5, 5)


@pytest.mark.parametrize("names", [("images", "labels"), ("samples", "labels"), ("arr_0", "arr_1")])
def test_sets_come_from_npz_files_of_other_programs(tmp_path, names):
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", **{names[0]: images, names[1]: np.array([2, 0, 1, 2])})
    found = read_image_set(tmp_path / "a.npz")
    assert torch.equal(found.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert found.names() == ["2", "0", "1", "2"]
    np.savez(tmp_path / "b.npz", images=images[..., 0], test_images=images[:2, ..., 1], test_labels=np.array([1, 0]))
    grey = read_image_set(tmp_path / "b.npz")
    assert torch.equal(grey.images[1], torch.from_numpy(images[1, ..., 1]).expand(3, 6, 8))
    assert len(read_image_set(tmp_path / "b.npz", split="train").images) == 4


def test_a_thinned_set_is_spread_over_the_whole():
    whole = ImageSet(images=torch.arange(10)[:, None, None, None], labels=torch.arange(10))
    assert whole.thinned(4).labels.tolist() == [0, 2, 5, 7]
    assert whole.thinned(4).images.flatten().tolist() == [0, 2, 5, 7]
    assert whole.thinned(0) is whole.thinned(12) is whole
    with pytest.raises(ValueError, match="not be negative"):
        whole.thinned(-1)


def test_shapes_are_judged_by_names_and_numbers_of_their_classes():
    data = open_generation_data(GenerationDataConfig(data="shapes", eval_samples=30), "val")
    images, labels = zip(*(data[index] for index in range(30)), strict=True)
    images, labels = as_pixels(torch.stack(images)), torch.tensor(labels)
    turned = {"class_names": SHAPES[::-1], "labels": len(SHAPES) - 1 - labels}
    for options in ({"labels": labels}, turned):
        assert shape_figures(ImageSet(images=images, **options))["asked_and_valid"] == 1
    with pytest.raises(ValueError, match=r"classes of shapes are circle, .*, or 0 to 4, got 9"):
        shape_figures(ImageSet(images=images, labels=torch.full((30,), 9)))


# ---- commands


def save_samples(path, count, seed=0, top=256):
    images = noise(count, seed=seed, top=top).images.permute(0, 2, 3, 1).numpy()
    np.savez(path, images=images, labels=np.arange(count) % 2)
    return path


@pytest.fixture
def quick_network(monkeypatch, tmp_path):
    """A file that is read as the network of means; the batches in which it was asked."""
    asked = []

    def observe(images):
        asked.append(len(images))
        return means(images), None

    monkeypatch.setattr(
        "nalaformer.evaluation.images.inception_extractor", lambda path, device: by_means(name=path.name, observe=observe)
    )
    (tmp_path / "net.pth").write_text("")
    return tmp_path / "net.pth", asked


@COMMANDS.of("eval images.samples", "eval images.reference", "eval images.extractor", "eval images.figure")
def test_eval_images_compares_what_it_is_told_to(tmp_path, quick_network):
    samples, reference = save_samples(tmp_path / "a.npz", 30, top=128), save_samples(tmp_path / "b.npz", 40, seed=1)
    shown = run("eval", "images", samples, "--reference", reference, "--extractor", quick_network[0])
    expected = image_figures(noise(30, top=128), noise(40, seed=1), by_means(name="net.pth"))
    assert len(expected) == 4
    assert all(figure(shown, name) == pytest.approx(value, rel=1e-3, abs=1e-3) for name, value in expected.items())
    assert "30 samples and 40 reference" in shown
    only = run("eval", "images", samples, "--reference", reference, "--extractor", quick_network[0], "--figure", "kernel")
    assert "kernel distance" in only
    assert "frechet" not in only
    same = run("eval", "images", samples, "--reference", samples, "--extractor", quick_network[0], "--figure", "frechet")
    assert figure(same, "frechet distance of net.pth") == pytest.approx(0, abs=1e-6)
    run("eval", "images", samples, "--reference", reference, fails="give --extractor")
    fid = ("--figure", "fid")
    run("eval", "images", samples, "--reference", reference, "--extractor", quick_network[0], *fid, fails="FID is defined by")


@COMMANDS.of("eval images.limit", "eval images.batch_size", "eval images.neighbours", "eval images.split", "eval images.size")
def test_eval_images_takes_as_many_and_as_large_images_as_asked(tmp_path, quick_network):
    path, asked = quick_network
    samples = save_samples(tmp_path / "a.npz", 30)
    write_images(tmp_path / "real", [f"{split}/a/{n}.png" for split, count in (("train", 9), ("val", 7)) for n in range(count)])
    common = ("eval", "images", samples, "--reference", tmp_path / "real", "--extractor", path)
    assert "30 samples and 7 reference" in run(*common, "--batch-size", 16)
    assert asked == [16, 14, 7]
    assert "30 samples and 9 reference" in run(*common, "--split", "train")
    assert "5 samples and 5 reference" in run(*common, "--limit", 5)
    run(*common, "--neighbours", 7, fails="8 or more images")
    write_images(tmp_path / "real" / "val" / "a", ["odd.png"], size=(20, 10))
    run(*common, fails="odd.png")
    assert "30 samples and 8 reference" in run(*common, "--size", 6)


@COMMANDS.of("eval images.device", "data encode.device")
def test_a_device_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    samples = save_samples(tmp_path / "a.npz", 4)
    rest = ("--extractor", tmp_path / "x.pth", "--device", "cuda")
    run("eval", "images", samples, "--reference", samples, *rest, fails="needs a CUDA device")
    rest = ("--autoencoder", tmp_path, "--out", tmp_path / "out", "--device", "cuda")
    run("data", "encode", samples, *rest, fails="needs a CUDA device")


def test_eval_images_reads_shapes_without_a_network(tmp_path):
    data = open_generation_data(GenerationDataConfig(data="shapes", eval_samples=20), "val")
    for index in range(20):
        image, label = data[index]
        path = tmp_path / "samples" / SHAPES[label] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = as_pixels(image).permute(1, 2, 0).numpy()
        Image.fromarray(pixels if index else np.zeros_like(pixels)).save(path)
    shown = run("eval", "images", tmp_path / "samples", "--reference", "shapes")
    assert figure(shown, "asked_and_valid") == 0.95
    (tmp_path / "flat").mkdir()
    path.rename(tmp_path / "flat" / "a.png")
    run("eval", "images", tmp_path / "flat", "--reference", "shapes", fails="classes of the samples must be known")
    asked = ("eval", "images", tmp_path / "samples", "--reference", "shapes", "--figure", "fid")
    run(*asked, fails="--figure chooses among the figures of a network, got fid without one")


@COMMANDS.of("data unpack.file", "data unpack.out", "data unpack.holdout", "data unpack.seed")
def test_a_classifier_learns_from_an_unpacked_file_and_judges_samples(tmp_path):
    """Red and blue images in one file; a run on them tells samples apart and gives its features."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 60, (20, 16, 16, 3), dtype=np.uint8), np.arange(20) % 2
    images[labels == 0, ..., 0] += 180
    images[labels == 1, ..., 2] += 180
    np.savez(tmp_path / "a.npz", images=images, labels=labels, class_names=np.array(["red", "blue"]))
    said = run("data", "unpack", tmp_path / "a.npz", "--out", tmp_path / "data", "--holdout", 0.4)
    assert "12 images of train, 8 images of val" in said
    run("data", "unpack", tmp_path / "a.npz", "--out", tmp_path / "other", "--holdout", 0.4, "--seed", 1)

    def held_out(name):
        return {path for path, _ in ImageFolder(tmp_path / name, "val", transform=lambda image: image).files}

    assert {path.replace("/data/", "/other/") for path in held_out("data")} != held_out("other")
    small = {
        "embed_dims": [16],
        "depths": [1],
        "num_heads": [2],
        "mlp_ratios": 1,
        "attention_stages": "l",
        "layer_scale": [None],
    }
    small |= {"key_reduction": 1, "softmax_key_reduction": 1, "patch_size": 8, "img_size": 32, "global_pool": "max"}
    settings = ["steps=20", "warmup=0", "batch_size=8", "eval_every=0", "save_every=0", "learning_rate=1e-2", "device=cpu"]
    settings += [f"model_options={json.dumps(small)}", "data_options={}", "image_size=32"]
    run("train", "cue_grid", f"data={tmp_path / 'data'}", *settings, "--out", tmp_path / "run")
    name = f"{load_run(tmp_path / 'run').recipe.model} (run)"
    samples = tmp_path / "samples.npz"
    np.savez(
        samples, images=images, labels=np.where(np.arange(20) < 5, 1 - labels, labels), class_names=np.array(["red", "blue"])
    )
    shown = run("eval", "images", samples, "--reference", tmp_path / "data", "--extractor", tmp_path / "run", "--device", "cpu")
    assert figure(shown, f"accuracy under {name}") == 0.75
    assert figure(shown, f"frechet distance of {name}") >= 0
    assert "FID" not in shown


@COMMANDS.of(
    *("data encode.images", "data encode.autoencoder", "data encode.out", "data encode.image_size"),
    *("data encode.holdout", "data encode.seed", "data encode.batch_size"),
)
def test_data_encode_encodes_as_asked(tmp_path, monkeypatch):
    asked = []

    def encode(config, autoencoder, out, *, batch_size, device, advance):
        advance(3, 6)
        asked.append((config, autoencoder, out, batch_size, device))
        return {"left_out": ["one.png is no image"], "counts": {"train": 4, "val": 1}, "shape": [4, 2, 2]}

    monkeypatch.setattr("nalaformer.data.generation.encode_images", encode)
    common = ("data", "encode", tmp_path / "a", "--autoencoder", tmp_path / "vae", "--out", tmp_path / "out", "--device", "cpu")
    shown = run(*common)
    assert "left out: one.png" in shown
    assert "4 latents of train, 1 latents of val, 4 x 2 x 2 each" in shown
    run(*common, "--image-size", 64, "--holdout", 0.2, "--seed", 3, "--batch-size", 5)
    config = GenerationDataConfig(data=str(tmp_path / "a"))
    assert asked[0] == (config, tmp_path / "vae", tmp_path / "out", 16, "cpu")
    changed = GenerationDataConfig(data=str(tmp_path / "a"), image_size=64, holdout=0.2, data_seed=3)
    assert asked[1] == (changed, tmp_path / "vae", tmp_path / "out", 5, "cpu")
