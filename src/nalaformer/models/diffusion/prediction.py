"""The prediction of a network under guidance, as a CUDA graph if launches would be the limit."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...ops.graphs import NotCapturable, captured
from ...watched_modules import is_watched
from .network import DiffusionTransformer

# up to this many tokens Python is slower than a GPU; capturing a graph costs about four steps
MOST_TOKENS_OF_GRAPH, FEWEST_CALLS_OF_GRAPH = 16_384, 10


def prediction(
    network: DiffusionTransformer, images: Tensor, labels: Tensor, guidance: float, *, calls: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of images and a time that predicts with guidance, as a CUDA graph if launches would be the limit.

    calls: the number of calls that will follow.
    """

    def eager(images: Tensor, time: Tensor) -> Tensor:
        return predict_guided(network, images, time, labels, guidance)

    tokens = images[:, 0].numel() // network.patch_size**2 * (1 if guidance == 1 else 2)
    is_worth_it = calls >= FEWEST_CALLS_OF_GRAPH and tokens <= MOST_TOKENS_OF_GRAPH
    # a replay calls no hooks, draws no dropout and does not see weights that autocast converts
    is_plain = not (network.training or any(map(is_watched, network.modules())) or torch.is_autocast_enabled("cuda"))
    if images.device.type != "cuda" or not is_worth_it or not is_plain:
        return eager
    kept_images, kept_time, outputs = images.clone(), torch.zeros((), device=images.device), [images]

    def call() -> None:
        outputs[:] = [eager(kept_images, kept_time)]

    try:
        replay = captured(call, device=images.device)
    except NotCapturable:
        return eager

    def replay_prediction(images: Tensor, time: Tensor) -> Tensor:
        kept_images.copy_(images)
        kept_time.copy_(time)
        replay()
        # clone: multistep samplers retain the predictions
        return outputs[0].clone()

    return replay_prediction


def predict_guided(network: DiffusionTransformer, images: Tensor, time: Tensor, labels: Tensor, guidance: float) -> Tensor:
    """Return the network's prediction under guidance, with the variance of the class."""
    times = time.expand(len(images))
    if guidance == 1:
        return network.predict(images, times, labels)
    nothing = torch.full_like(labels, network.num_classes)
    both = network.predict(images.repeat(2, 1, 1, 1), times.repeat(2), torch.cat((labels, nothing)))
    of_class, of_none = both.chunk(2)
    channels = network.channels
    apart = of_class[:, :channels] - of_none[:, :channels]
    return torch.cat((of_none[:, :channels] + guidance * apart, of_class[:, channels:]), dim=1)
