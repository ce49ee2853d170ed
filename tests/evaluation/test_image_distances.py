"""Distances between sets of features agree with formulas written apart, and behave as their meaning demands."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

from nalaformer.evaluation.images import distances as distances_module
from nalaformer.evaluation.images import frechet_distance, kernel_distance, precision_and_recall


def features(count, size=5, shift=0.0, scale=1.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=torch.Generator().manual_seed(99))
    return shift + scale * torch.randn(count, size, generator=random) @ mixing


def test_frechet_distance_is_that_of_the_matrix_root():
    x, y = features(40), features(30, shift=0.7, scale=1.5, seed=1)
    s, t = (np.cov(each.double().numpy(), rowvar=False) for each in (x, y))
    apart = ((x.double().mean(0) - y.double().mean(0)) ** 2).sum().item()
    expected = apart + np.trace(s + t - 2 * np.real(sqrtm(s @ t)))
    assert frechet_distance(x, y) == pytest.approx(expected, rel=1e-6)


def test_frechet_distance_is_torchmetrics_with_the_same_features():
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Same(nn.Module):
        num_features = 5

        def forward(self, images):
            return images

    x, y = features(40), features(30, shift=0.7, seed=1)
    metric = FrechetInceptionDistance(feature=Same(), input_img_size=(5,)).set_dtype(torch.float64)
    metric.update(x, real=False)
    metric.update(y, real=True)
    # their sums lose digits, their own test of it allows as much
    assert frechet_distance(x, y) == pytest.approx(metric.compute().item(), rel=1e-4)


def test_frechet_distance_of_shifted_and_stretched_sets_is_known():
    x = features(50)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(x, x + 2) == pytest.approx(5 * 4, rel=1e-6)
    # tr (S + 9 S - 6 S) = 4 tr S, and the mean moves by twice itself
    trace = torch.cov(x.double().mT).trace().item()
    assert frechet_distance(x, 3 * x) == pytest.approx(4 * trace + 4 * x.double().mean(0).square().sum().item(), rel=1e-5)


def test_frechet_distance_of_fewer_samples_than_features_is_finite():
    x, y = features(4, size=9), features(4, size=9, seed=1)
    assert 0 < frechet_distance(x, y) < 1e3
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-5)


def naive_discrepancy(x, y):
    def kernel(a, b):
        return (float(a @ b) / len(a) + 1) ** 3

    def mean(a, b, same):
        pairs = [(i, j) for i, j in product(range(len(a)), range(len(b))) if not same or i != j]
        return sum(kernel(a[i], b[j]) for i, j in pairs) / len(pairs)

    return mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)


def test_kernel_distance_of_whole_sets_is_the_naive_sum():
    x, y = features(12), features(12, shift=0.5, seed=1)
    expected = naive_discrepancy(x.double().numpy(), y.double().numpy())
    assert kernel_distance(x, y) == pytest.approx(expected, rel=1e-6)


def test_kernel_distance_is_about_nothing_for_one_distribution_and_repeats(monkeypatch):
    monkeypatch.setattr(distances_module, "PART_SIZE", 100)
    x, y, far = features(400) / 5, features(400, seed=1) / 5, features(400, shift=3, seed=2) / 5
    assert abs(kernel_distance(x, y)) < 0.1 * kernel_distance(x, far)
    assert kernel_distance(x, y) == kernel_distance(x, y)
    assert kernel_distance(x, y, seed=1) != kernel_distance(x, y)


def naive_precision(points, centres, neighbours):
    def distance(a, b):
        return float(((a - b) ** 2).sum() ** 0.5)

    reach = [sorted(distance(a, b) for j, b in enumerate(centres) if j != i)[neighbours - 1] for i, a in enumerate(centres)]
    return sum(any(distance(p, c) <= r for c, r in zip(centres, reach, strict=True)) for p in points) / len(points)


@pytest.mark.parametrize("neighbours", [1, 3])
def test_precision_and_recall_are_the_naive_ones(neighbours, monkeypatch):
    # rows in several parts
    monkeypatch.setattr(distances_module, "ROWS", 7)
    x, y = features(25), features(31, shift=0.8, scale=1.4, seed=1)
    expected = [naive_precision(*(each.double().numpy() for each in pair), neighbours) for pair in ((x, y), (y, x))]
    assert list(precision_and_recall(x, y, neighbours=neighbours)) == pytest.approx(expected)
    assert min(expected) > 0
    assert max(expected) < 1


def test_samples_of_one_mode_are_precise_and_miss_the_other():
    modes = torch.cat([features(40), features(40, shift=50.0, seed=1)])
    samples = features(40, seed=2)
    precision, recall = precision_and_recall(samples, modes)
    assert precision > 0.8
    assert recall <= 0.5
    assert precision_and_recall(modes, samples)[1] == pytest.approx(precision)


@pytest.mark.parametrize(
    ("samples", "reference", "message"),
    [
        (features(3), features(9), r"samples must be 4 or more images with features each, got \[3, 5\]"),
        (features(9), features(9, size=6), "features of one network, got 5 and 6"),
        (features(9), features(9) / 0, "features of the reference must be finite"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(samples, reference, message):
    with pytest.raises(ValueError, match=message):
        precision_and_recall(samples, reference)
