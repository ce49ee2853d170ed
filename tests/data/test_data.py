"""Generated images, folders of images, and batches that follow from seed and step."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from nalaformer.data import GENERATED, CountGrid, CueGrid, MarkedPair

# sha256 over pixels and labels of the first eight samples: data that changes silently changes every figure learned on it
CHECKSUMS = {
    "cue_grid": "f1fd6efd10162663",
    "count_grid": "c5c8fea63840321a",
    "marked_pair": "3fb0e2eaf7c00cb3",
}


@pytest.mark.parametrize("name", GENERATED.names())
def test_the_first_samples_never_change(name):
    digest = hashlib.sha256()
    for image, label in itertools.islice(GENERATED[name](split="train", samples=8, seed=0), 8):
        digest.update((255 * (image + 0.5)).round().to(torch.uint8).numpy().tobytes() + bytes([label]))
    assert digest.hexdigest()[:16] == CHECKSUMS[name]


@pytest.mark.parametrize("name", GENERATED.names())
def test_a_sample_depends_on_seed_split_and_index_alone(name):
    data = GENERATED[name](split="train", samples=10)
    torch.manual_seed(1)
    np.random.seed(1)
    image, label = data[7]
    again, same_label = GENERATED[name](split="train", samples=99)[7]
    assert torch.equal(image, again)
    assert label == same_label
    assert not torch.equal(image, GENERATED[name](split="val", samples=10)[7][0])
    assert not torch.equal(image, GENERATED[name](split="train", samples=10, seed=1)[7][0])
    assert not torch.equal(image, data[6][0])


@pytest.mark.parametrize("name", GENERATED.names())
def test_every_class_comes_about_equally_often(name):
    data = GENERATED[name](split="val", samples=800)
    counts = np.bincount([data[i][1] for i in range(800)], minlength=len(data.classes))
    expected = 800 / len(data.classes)
    # four standard deviations of a binomial count
    assert np.abs(counts - expected).max() < 4 * expected**0.5
    assert len(counts) == len(data.classes)


@pytest.mark.parametrize("name", GENERATED.names())
def test_images_have_the_size_and_range_they_say(name):
    data = GENERATED[name](split="train", samples=4)
    image, _ = data[0]
    assert image.shape == (3, data.image_size, data.image_size)
    assert image.dtype == torch.float32
    assert image.min() >= -0.5
    assert image.max() <= 0.5


def colour_histograms(data, bins=4):
    """Counts of colours over the whole image, [samples, bins^3], and labels."""
    features, labels = [], []
    for image, label in itertools.islice(data, len(data)):
        level = ((image + 0.5) * (bins - 1e-3)).long()
        code = (level[0] * bins + level[1]) * bins + level[2]
        features.append(torch.bincount(code.flatten(), minlength=bins**3).float())
        labels.append(label)
    x = torch.stack(features).sqrt()
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-3), torch.tensor(labels)


def logistic_accuracy(x, y, classes):
    """Accuracy of a logistic regression on the half it has not seen."""
    half = len(x) // 2
    weight = torch.zeros(x.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=40)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(x[:half] @ weight, y[:half]) + 1e-2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return (x[half:] @ weight).argmax(1).eq(y[half:]).float().mean().item()


@pytest.mark.parametrize("name", GENERATED.names())
def test_colours_alone_do_not_tell_the_class(name, one_thread):
    data = GENERATED[name](split="val", samples=1200)
    chance = 1 / len(data.classes)
    accuracy = logistic_accuracy(*colour_histograms(data), len(data.classes))
    # four standard errors of 600 guesses
    assert accuracy < chance + 4 * (chance * (1 - chance) / 600) ** 0.5


def test_the_shortcut_check_finds_a_shortcut(one_thread):
    class Tinted(CueGrid):
        def draw(self, random):
            pixels, label = super().draw(random)
            pixels[0, :4] = label / 4
            return pixels, label

    data = Tinted(split="val", samples=600)
    assert logistic_accuracy(*colour_histograms(data), 4) > 0.6


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_cued_colour_belongs_to_the_answer_alone(split):
    data = CueGrid(split=split, samples=20, separation=20)
    for index in range(20):
        image, label = data[index]
        cells = (image + 0.5).unflatten(1, (6, 8)).unflatten(3, (6, 8)).permute(1, 3, 0, 2, 4).reshape(36, 3, 8, 8)
        is_cue = (cells[:, :, 0] == 1).all(dim=(1, 2))
        assert is_cue.sum() == 1
        cue = cells[is_cue][0, :, 4, 4]
        colours = cells[~is_cue].flatten(2).amax(2)
        filled = colours.amax(1) > 0
        angle = torch.nn.functional.cosine_similarity(colours[filled] - 0.5, (cue - 0.5)[None]).clamp(-1, 1).acos().rad2deg()
        assert (angle < 1).sum() == 1
        assert (angle < 19.9).sum() == 1
        answer = cells[~is_cue][filled][angle.argmin()]
        shape = (answer.amax(0) > 0).float()
        assert torch.equal(shape, torch.from_numpy(data.masks[label]))


def test_every_glyph_of_a_cue_grid_comes_equally_often():
    data = CueGrid(split="val", samples=5)
    masks = torch.from_numpy(data.masks)
    for index in range(5):
        cells = (data[index][0] + 0.5).unflatten(1, (6, 8)).unflatten(3, (6, 8)).permute(1, 3, 0, 2, 4).reshape(36, 3, 8, 8)
        shapes = (cells.amax(1) > 0).float()
        assert [(shapes == mask).all(dim=(1, 2)).sum().item() for mask in masks] == [8] * 4


def test_the_count_is_the_number_of_glyphs_like_the_marked_one():
    data = CountGrid(split="val", samples=20)
    for index in range(20):
        image, label = data[index]
        cells = (image + 0.5).unflatten(1, (6, 8)).unflatten(3, (6, 8)).permute(1, 3, 0, 2, 4).reshape(36, 3, 8, 8)
        is_cue = (cells[:, :, 0] == 1).all(dim=(1, 2))
        inside = cells[is_cue][0, 0, 1:-1, 1:-1]
        shapes = (cells[~is_cue].amax(1) > 0).float()[:, 1:-1, 1:-1]
        assert (shapes == inside).all(dim=(1, 2)).sum().item() == label + 1


def test_marked_pairs_relate_as_their_label_says():
    data = MarkedPair(split="val", samples=40)
    for index in range(40):
        image, label = data[index]
        pixels = (image + 0.5).numpy()
        white = (pixels == 1).all(0)
        # upper left corners of the frames: white with 13 white to the right and below, and none before
        corners = [
            (y, x)
            for y, x in np.argwhere(white)
            if white[y, x : x + 13].sum() == 13 and white[y : y + 13, x].sum() == 13 and white[y + 12, x : x + 13].sum() == 13
        ]
        assert len(corners) == 2
        shapes, colours = [], []
        for y, x in corners:
            inside = pixels[:, y + 2 : y + 11, x + 2 : x + 11]
            shapes.append(inside.max(0) > 0)
            colours.append(inside.max(axis=(1, 2)))
        assert np.array_equal(*shapes) == bool(label & 2)
        assert np.allclose(*colours) == bool(label & 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CueGrid(split="test", samples=1), "train"),
        (lambda: CueGrid(split="train", samples=0), "samples must be positive"),
        (lambda: CueGrid(split="train", samples=1, glyphs=9), "glyphs must be between"),
        (lambda: CueGrid(split="train", samples=1, cells=1), "room for every glyph"),
        (lambda: CueGrid(split="train", samples=1, cell_size=7), "at least 8 pixels"),
        (lambda: CueGrid(split="train", samples=1, separation=90), "separation"),
        (lambda: CountGrid(split="train", samples=1, most=99), "most must be"),
        (lambda: MarkedPair(split="train", samples=1, image_size=32), "larger image_size"),
    ],
)
def test_impossible_images_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
