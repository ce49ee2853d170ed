"""Data for generators of images: every kind gives the same interface, every option has its effect, broken files are named."""

import io
import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.option_effects import Effects
from nalaformer.atomic_files import unfinished_folder
from nalaformer.data import BadSample, ImageFolder
from nalaformer.data.generation import (
    GENERATION_DATA,
    GenerationDataConfig,
    as_pixels,
    as_values,
    encode_images,
    load_autoencoder,
    open_generation_data,
    unpack_images,
)
from nalaformer.data.generation import encoding as encoding_module
from nalaformer.data.generation.encoding import NOTE
from nalaformer.data.generation.latents import ABOUT
from nalaformer.data.loading import random_state_of

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = Effects(field.name for field in fields(GenerationDataConfig))


def test_no_option_is_without_a_test_of_its_effect():
    assert CONFIG.missing() == []


def opened(data, split="train", **settings):
    return open_generation_data(GenerationDataConfig(data=str(data), **settings), split)


# red rises to the right
RAMP = np.broadcast_to((np.arange(24) * 10).astype(np.uint8)[None, :, None], (16, 24, 3)) * np.array([1, 0, 0], dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Three images of 24 x 16 pixels in each class of each split, none like another."""
    places = (f"{split}/{name}/{each}.png" for split in ("train", "val") for name in "ab" for each in "123")
    for number, place in enumerate(places):
        path = tmp_path / "images" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RAMP + np.array([0, 0, 10 * number], dtype=np.uint8)).save(path)
    return tmp_path / "images"


def arrays(grey=True, count=6):
    shape = (count, 8, 12) if grey else (count, 8, 12, 3)
    random = np.random.default_rng(0)
    found = {}
    for split in ("train", "test"):
        found[f"{split}_images"] = random.integers(0, 256, shape, dtype=np.uint8)
        found[f"{split}_labels"] = np.arange(count, dtype=np.uint8) % 3
    return found


@pytest.fixture
def npz(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    return tmp_path / "a.npz"


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    """A tiny random AutoencoderKL, which halves the sides once."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 2, "sample_size": 16}
    model = AutoencoderKL(**blocks, **sizes, scaling_factor=0.5, shift_factor=0.25)
    path = tmp_path_factory.mktemp("autoencoder") / "vae"
    model.save_pretrained(str(path))
    return path


@pytest.fixture
def latents(folder, autoencoder, tmp_path):
    encode_images(GenerationDataConfig(data=str(folder), image_size=16), autoencoder, tmp_path / "latents", batch_size=2)
    return tmp_path / "latents"


# ---- every kind


@pytest.mark.parametrize("name", GENERATION_DATA.names())
def test_every_kind_gives_images_of_its_facts(name, request):
    sources = {"shapes": lambda: "shapes", "folder": lambda: request.getfixturevalue("folder")}
    sources |= {kind: (lambda kind=kind: request.getfixturevalue(kind)) for kind in ("npz", "latents")}
    source = sources[name]()
    for split in ("train", "val"):
        data = opened(source, split, image_size=16, eval_samples=5, train_samples=5)
        assert type(data) is GENERATION_DATA[name]
        assert data.num_classes == len(data.class_names) > 1
        for index in range(len(data)):
            image, label = data[index]
            assert image.shape == (data.channels, data.height, data.width)
            assert image.dtype == torch.float32
            assert 0 <= label < data.num_classes
            assert isinstance(label, int)
            if name != "latents":
                assert -1 <= image.min() <= image.max() <= 1
        assert not torch.equal(data[0][0], data[1][0])
    with pytest.raises(ValueError, match=r'split must be "train" or "val", got .test.'):
        opened(source, "test")


@CONFIG.of("data")
def test_data_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown data 'shape'; did you mean 'shapes'\?.*or a path"):
        opened("shape")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"must be a folder, a \.npz file or the name of generated data, got the file"):
        opened(tmp_path / "a.txt")


def test_pixels_survive_the_way_to_values_and_back():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for image in (pixels.numpy(), pixels[..., None].expand(16, 16, 3).numpy()):
        values = as_values(image)
        assert (values.min(), values.max()) == (-1, 1)
        assert torch.equal(as_pixels(values), pixels.expand(3, 16, 16))
    with pytest.raises(ValueError, match="got 4; decode latents with their autoencoder first"):
        as_pixels(torch.zeros(1, 4, 2, 2))


# ---- options


@CONFIG.of("train_samples", "eval_samples", "data_seed")
def test_so_many_shapes_of_that_seed_are_drawn():
    assert (len(opened("shapes", train_samples=5)), len(opened("shapes", "val", eval_samples=3))) == (5, 3)
    zero, one = (opened("shapes", data_seed=seed)[0][0] for seed in (0, 1))
    assert not torch.equal(zero, one)
    assert not torch.equal(zero, opened("shapes", "val")[0][0])
    with pytest.raises(IndexError):
        opened("shapes", train_samples=5)[5]


@CONFIG.of("image_size")
def test_the_square_in_the_middle_is_resized(folder):
    image = opened(folder, image_size=16)[0][0]
    # columns 4 to 19 of 24, and nothing is resized
    assert torch.equal(as_pixels(image)[0, 0], torch.arange(4, 20, dtype=torch.uint8) * 10)
    half = as_pixels(opened(folder, image_size=8)[0][0])[0, 0].float()
    assert half.shape == (8,)
    # inside, a ramp is resized to its means
    assert torch.allclose(half[2:-2], torch.arange(4, 20).view(8, 2).float().mean(1)[2:-2] * 10, atol=1.5)


@CONFIG.of("flip")
def test_half_of_the_training_images_are_mirrored(folder, npz):
    def rising(data, count=60):
        found = 0
        for seed in range(count):
            with random_state_of(seed):
                image = data[0][0]
            found += bool((image[:, 0, 0] < image[:, 0, -1]).any())
        return found

    assert rising(opened(folder, image_size=16)) == 60
    assert rising(opened(folder, "val", image_size=16, flip=True)) == 60
    # four standard deviations
    assert rising(opened(folder, image_size=16, flip=True)) == pytest.approx(30, abs=16)
    plain = opened(npz)[0][0]
    mirrored = []
    for seed in range(20):
        with random_state_of(seed):
            image = opened(npz, flip=True)[0][0]
        assert torch.equal(image, plain) or torch.equal(image, plain.flip(2))
        mirrored.append(not torch.equal(image, plain))
    assert 0 < sum(mirrored) < 20


@CONFIG.of("holdout")
def test_a_share_of_each_class_is_held_out(folder, tmp_path):
    images, labels = arrays(count=20)["train_images"], np.arange(20) % 2
    np.savez(tmp_path / "whole.npz", images=images, labels=labels)
    sizes = [len(opened(tmp_path / "whole.npz", split, holdout=0.3)) for split in ("train", "val")]
    assert sizes == [14, 6]
    val = opened(tmp_path / "whole.npz", "val", holdout=0.3)
    assert sorted(val.labels.tolist()) == [0] * 3 + [1] * 3
    train = opened(tmp_path / "whole.npz", holdout=0.3)
    held, kept = ([data[index][0] for index in range(len(data))] for data in (val, train))
    assert not any(torch.equal(one, other) for one in held for other in kept)
    other = opened(tmp_path / "whole.npz", "val", holdout=0.3, data_seed=1)
    assert not np.array_equal(other.images, val.images)
    with pytest.raises(BadSample, match=r"holdout=0\.1 would set a tenth"):
        opened(tmp_path / "whole.npz")
    assert [len(opened(folder / "train", split, holdout=0.4, image_size=8)) for split in ("train", "val")] == [4, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 0}, "image_size must be positive"),
        ({"eval_samples": 0}, "eval_samples must be positive"),
        ({"data_seed": -1}, "data_seed must not be negative"),
        ({"holdout": 1.0}, "holdout must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GenerationDataConfig(data="shapes", **settings)


# ---- folders


def test_a_broken_image_is_named_and_classes_must_agree(folder):
    broken = folder / "train" / "a" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(BadSample, match=r"a/1\.png is no image"):
        opened(folder, image_size=16)[0]
    (folder / "val" / "c").mkdir()
    with pytest.raises(ValueError, match="same class folders, got only in one of them: c"):
        opened(folder)


# ---- .npz files


def test_an_npz_file_keeps_its_colours_and_its_splits(tmp_path):
    for grey in (True, False):
        content = arrays(grey)
        np.savez_compressed(tmp_path / "a.npz", **content)
        for split, field in (("train", "train"), ("val", "test")):
            data = opened(tmp_path / "a.npz", split)
            assert (data.channels, data.height, data.width) == (1 if grey else 3, 8, 12)
            pixels = content[f"{field}_images"][4]
            expected = torch.from_numpy(np.stack([pixels] * 3) if grey else np.moveaxis(pixels, 2, 0))
            assert torch.equal(as_pixels(data[4][0]), expected)
            assert [data[index][1] for index in range(6)] == [0, 1, 2, 0, 1, 2]
    assert data.class_names == ("0", "1", "2")
    np.savez(tmp_path / "b.npz", **content, class_names=np.array(["top", "shoe", "bag"]))
    assert opened(tmp_path / "b.npz").class_names == ("top", "shoe", "bag")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": None}, "field train_images is missing, it has test_images"),
        ({"train_labels": None}, "field train_labels is missing"),
        ({"train_images": np.zeros((6, 8, 12))}, r"field train_images must be uint8 .* got float64 \[6, 8, 12\]"),
        ({"train_images": np.zeros((6, 8, 12, 4), np.uint8)}, r"got uint8 \[6, 8, 12, 4\]"),
        ({"train_labels": np.zeros(5, int)}, r"field train_labels must be integers \[6\], .* got int64 \[5\]"),
        ({"train_labels": np.zeros(6)}, r"field train_labels must be integers \[6\].* got float64"),
        ({"test_labels": np.full(6, -1)}, "field test_labels must hold labels from 0 to 99,999, got -1"),
        ({"train_labels": np.full(6, 10**9)}, "field train_labels must hold labels from 0 to 99,999, got 1000000000"),
        ({"train_labels": np.full(6, 2**64 - 1, np.uint64)}, "from 0 to 99,999, got 18446744073709551615"),
        ({"train_labels": np.array([{}] * 6)}, "field train_labels cannot be read: Object arrays"),
        ({"class_names": np.array(["a"])}, r"field class_names must be text \[3\]"),
        ({"class_names": np.array(["a", "b", "../c"])}, r"names of folders, all different, got \['../c'\]"),
        ({"test_images": np.zeros((6, 8, 8), np.uint8)}, "must have one size"),
    ],
)
def test_a_broken_npz_file_names_its_field(tmp_path, changes, message):
    content = {name: value for name, value in (arrays() | changes).items() if value is not None}
    np.savez(tmp_path / "a.npz", **content)
    with pytest.raises(BadSample, match=rf"a\.npz is no \.npz file of images that can be used: .*{message}"):
        opened(tmp_path / "a.npz")


def test_a_cut_npz_file_and_one_that_unpacks_to_too_much_are_refused(npz, monkeypatch):
    monkeypatch.setattr("nalaformer.data.generation.npz_images.MOST_BYTES", 1000)
    with pytest.raises(BadSample, match=r"unpacks to [\d,]+ bytes, at most 1,000"):
        opened(npz)
    npz.write_bytes(npz.read_bytes()[:200])
    with pytest.raises(BadSample, match=r"a\.npz is no \.npz file of images that can be used: File is not a zip file"):
        opened(npz)


def test_unpacked_images_are_those_of_the_file(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("nalaformer.atomic_files.sync", synced.append)
    content = arrays()
    labels = np.arange(6) % 3 + 9
    np.savez(tmp_path / "a.npz", **(content | {"train_labels": labels, "test_labels": labels}))
    assert unpack_images(tmp_path / "a.npz", tmp_path / "out") == {"train": 6, "val": 6}
    # one by one, 70,000 images take minutes
    assert not any(path.suffix == ".png" for path in synced)
    for split, field in (("train", "train"), ("val", "test")):
        found = ImageFolder(tmp_path / "out", split, transform=lambda image: torch.from_numpy(np.array(image)))
        assert found.classes == tuple(f"{number:02d}" for number in range(12))
        assert sorted(label for _, label in found.files) == sorted(labels.tolist())
        # the first of class 9 is the first of the file
        assert np.array_equal(found[0][0][..., 0].numpy(), content[f"{field}_images"][0])
    with pytest.raises(ValueError, match="must not exist or be an empty folder"):
        unpack_images(tmp_path / "a.npz", tmp_path / "out")


# ---- latents


def test_latents_are_those_of_the_autoencoder(folder, latents, autoencoder):
    from diffusers import AutoencoderKL

    model = AutoencoderKL.from_pretrained(autoencoder)
    pixels, encoded = (opened(source, "val", image_size=16) for source in (folder, latents))
    assert (encoded.channels, encoded.height, encoded.width) == (2, 8, 8)
    assert encoded.class_names == ("a", "b")
    with torch.no_grad():
        for index in range(6):
            image, label = pixels[index]
            mean = model.encode(image[None]).latent_dist.mean[0]
            found, found_label = encoded[index]
            # float16 rounds by 2^-11
            assert torch.allclose(found, (mean - 0.25) * 0.5, rtol=2e-3, atol=2e-3)
            assert found_label == label
        whole = load_autoencoder(autoencoder)
        expected = model.decode(mean[None]).sample
        assert torch.allclose(whole.decode((mean[None] - 0.25) * 0.5), expected, atol=1e-4)


def test_training_latents_are_drawn_around_the_mean_with_their_deviation(folder, latents, autoencoder):
    from diffusers import AutoencoderKL

    train = opened(latents)
    drawn = []
    for seed in range(300):
        with random_state_of(seed):
            drawn.append(train[1][0])
    drawn = torch.stack(drawn)
    with torch.no_grad():
        image = opened(folder, image_size=16)[1][0]
        expected = AutoencoderKL.from_pretrained(autoencoder).encode(image[None]).latent_dist
    mean, deviation = (expected.mean[0] - 0.25) * 0.5, expected.std[0] * 0.5
    # the mean of 300 draws, and the spread of 300 x 128
    assert ((drawn.mean(0) - mean) / deviation).abs().max() < 5 / 300**0.5
    assert ((drawn - mean) / deviation).std().item() == pytest.approx(1, abs=0.03)


def test_a_stopped_encoding_goes_on_and_gives_the_same(folder, autoencoder, tmp_path, monkeypatch, latents):
    monkeypatch.setattr(encoding_module, "SHARD", 2)
    encoded, right = [], encoding_module.encode_shard

    def stopping(encoder, data, places, path, batch_size):
        if len(encoded) == 4:
            raise KeyboardInterrupt
        encoded.append(path.name)
        return right(encoder, data, places, path, batch_size)

    config = GenerationDataConfig(data=str(folder), image_size=16)
    monkeypatch.setattr(encoding_module, "encode_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        encode_images(config, autoencoder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(encoding_module, "encode_shard", right)
    aside = unfinished_folder(tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in aside.glob("*.npy")}
    assert len(before) == 4
    with pytest.raises(ValueError, match="goes on with the images and the autoencoder that it was begun with"):
        encode_images(GenerationDataConfig(data=str(folder), image_size=8), autoencoder, tmp_path / "out")
    done = []
    about = encode_images(config, autoencoder, tmp_path / "out", advance=lambda *numbers: done.append(numbers))
    assert about["counts"] == {"train": 6, "val": 6}
    assert done == [(2, 12)] * 6
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == time for name, time in before.items())
    assert not (tmp_path / "out" / NOTE).exists()
    one, other = (opened(path, "val") for path in (tmp_path / "out", latents))
    assert all(torch.allclose(one[index][0], other[index][0], atol=2e-3) for index in range(6))
    assert one.labels.tolist() == other.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_images_that_cannot_be_read_are_left_out_and_noted(folder, autoencoder, tmp_path):
    broken = folder / "train" / "b" / "2.png"
    broken.write_bytes(b"no image")
    config = GenerationDataConfig(data=str(folder), image_size=16)
    about = encode_images(config, autoencoder, tmp_path / "out", batch_size=4)
    assert about["counts"] == {"train": 5, "val": 6}
    assert [str(broken) in line for line in about["left_out"]] == [True]
    assert opened(tmp_path / "out").labels.tolist() == [0, 0, 0, 1, 1]


def test_autoencoders_of_another_kind_are_refused(autoencoder, tmp_path, folder):
    def refused(message, **files):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        for name, content in files.items():
            (path / f"{name}.json").write_text(content)
        with pytest.raises(ValueError, match=f"must be the folder of an AutoencoderKL of diffusers.*{message}"):
            load_autoencoder(path)

    refused("without config.json")
    refused("got VQModel in", config='{"_class_name": "VQModel"}')
    refused("got no _class_name", config="[]")
    refused("whole pipeline; name its part: .*vae", model_index="{}")
    refused("got none in", config='{"_class_name": "AutoencoderKL"}')
    with pytest.raises(
        ValueError, match=r"multiples of 2, by which the autoencoder reduces them, got 15 x 15; .* such as 16 x 16"
    ):
        encode_images(GenerationDataConfig(data=str(folder), image_size=15), autoencoder, tmp_path / "out")


def test_latents_of_latents_are_refused(latents, autoencoder, tmp_path):
    with pytest.raises(ValueError, match="must be pixels, got the latents"):
        encode_images(GenerationDataConfig(data=str(latents)), autoencoder, tmp_path / "again")


def zip_of(content):
    archive = io.BytesIO()
    np.savez(archive, latents=np.load(io.BytesIO(content)))
    return archive.getvalue()


def noting(changes):
    return lambda content: json.dumps(json.loads(content) | changes).encode()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (ABOUT, lambda content: b"{", "about.json cannot be used: it cannot be read"),
        (ABOUT, noting({"shape": None}), "TypeError"),
        (ABOUT, noting({"format": "2"}), "its format must be"),
        (
            ABOUT,
            noting({"shape": [3, 8, 8]}),
            r"float16 \[images, 2, 3, 8, 8\]",
        ),
        (ABOUT, noting({"shards": {"train": 10**18}}), r"train_00001\.npy cannot be used: .*No such file"),
        ("train_00000.npy", lambda content: zip_of(content), r"train_00000\.npy must be a whole \.npy file"),
        ("train_00000.npy", lambda content: content[:100], r"train_00000\.npy cannot be used"),
        ("train_00000.json", lambda content: b'{"labels": [0, 1]}', "one for each of 6 latents, got 2"),
        ("train_00000.json", lambda content: b'{"labels": [0, 0, 0, 1, 1, 2]}', "numbers from 0 to 1"),
    ],
)
def test_damaged_latents_name_their_file(latents, name, change, message):
    path = latents / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadSample, match=message):
        opened(latents)


def test_a_latent_that_is_not_finite_is_a_bad_sample(latents):
    array = np.load(latents / "train_00000.npy")
    array[2, 0, 0, 3, 3] = np.inf
    np.save(latents / "train_00000.npy", array)
    data = opened(latents)
    data[1]
    with pytest.raises(BadSample, match=r"train_00000\.npy cannot be used: its latent 2 must be finite"):
        data[2]
