"""How far two sets of images are apart, by features of a network: [N, F] each, in float64."""

import torch
from torch import Tensor

# of the kernel distance: means over so many random parts of so many samples
PARTS, PART_SIZE = 100, 1000
# rows of distances that are held at once
ROWS = 1024


def frechet_distance(samples: Tensor, reference: Tensor) -> float:
    """|m - n|^2 + tr(S + T - 2 (S T)^(1/2)), with the means m, n and covariances S, T of the two sets."""
    check_features(samples, reference, least=2)
    x, y = samples.double(), reference.double()
    apart = (x.mean(0) - y.mean(0)).square().sum()
    s, t = covariance(x), covariance(y)
    # tr (S T)^(1/2) = tr (R T R)^(1/2) with R = S^(1/2), and R T R is symmetric: its roots are real
    values, vectors = torch.linalg.eigh(s)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    mixed = torch.linalg.eigvalsh(root @ t @ root).clamp(min=0).sqrt().sum()
    return max(0.0, (apart + s.trace() + t.trace() - 2 * mixed).item())


def covariance(features: Tensor) -> Tensor:
    """[N, F] -> [F, F], divided by N - 1."""
    centred = features - features.mean(0)
    return centred.mT @ centred / (len(features) - 1)


def kernel_distance(samples: Tensor, reference: Tensor, *, seed: int = 0) -> float:
    """Squared maximum mean discrepancy of the kernel (x y / F + 1)^3, unbiased: it may be a little below 0.

    mean over 100 random parts of 1,000 of each set (or of all, where one has fewer).
    """
    check_features(samples, reference, least=2)
    size = min(PART_SIZE, len(samples), len(reference))
    random = torch.Generator().manual_seed(seed)

    def part(features: Tensor) -> Tensor:
        return features[torch.randperm(len(features), generator=random)[:size].to(features.device)].double()

    found = [discrepancy(part(samples), part(reference)) for _ in range(PARTS)]
    return sum(found) / len(found)


def discrepancy(x: Tensor, y: Tensor) -> float:
    """mean k(x, x') + mean k(y, y') - 2 mean k(x, y), pairs of one point with itself left out."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.mT / a.shape[1] + 1) ** 3

    def mean_of_pairs(a: Tensor) -> Tensor:
        values = kernel(a, a)
        return (values.sum() - values.trace()) / (len(a) * (len(a) - 1))

    return (mean_of_pairs(x) + mean_of_pairs(y) - 2 * kernel(x, y).mean()).item()


def precision_and_recall(samples: Tensor, reference: Tensor, *, neighbours: int = 3) -> tuple[float, float]:
    """Share of the samples that lie near the reference, and of the reference near the samples (Kynkäänniemi et al., 2019).

    A point is near a set where it lies in a ball around one of its members that reaches to the k-th nearest of the others.
    """
    check_features(samples, reference, least=neighbours + 1)
    if neighbours < 1:
        raise ValueError(f"neighbours must be positive, got {neighbours}")
    x, y = samples.double(), reference.double()
    return share_within(x, y, radii(y, neighbours)), share_within(y, x, radii(x, neighbours))


def radii(points: Tensor, neighbours: int) -> Tensor:
    """[N]: the distance of each point to the k-th nearest of the others."""
    # each is the nearest to itself
    rows = (torch.cdist(part, points).kthvalue(neighbours + 1, dim=1).values for part in points.split(ROWS))
    return torch.cat(list(rows))


def share_within(points: Tensor, centres: Tensor, reach: Tensor) -> float:
    """Share of the points that lie in a ball around one of the centres."""
    inside = sum(int((torch.cdist(part, centres) <= reach).any(dim=1).sum()) for part in points.split(ROWS))
    return inside / len(points)


def check_features(samples: Tensor, reference: Tensor, *, least: int) -> None:
    for name, features in (("samples", samples), ("reference", reference)):
        if features.ndim != 2 or len(features) < least:
            raise ValueError(f"the {name} must be {least} or more images with features each, got {list(features.shape)}")
        if not bool(features.isfinite().all()):
            raise ValueError(f"the features of the {name} must be finite, got NaN or infinity; the extractor does not fit")
    if samples.shape[1] != reference.shape[1]:
        raise ValueError(f"both sets need features of one network, got {samples.shape[1]} and {reference.shape[1]} of them")
