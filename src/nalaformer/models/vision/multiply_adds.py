"""Exact multiply-adds of a model for one image, counted from the shapes of its layers."""

import torch
from torch import Tensor, nn

from ...attention import Attention
from ...attention.windows import Windows


def count_multiply_adds(model: nn.Module, image_size: tuple[int, int]) -> int:
    """Count the multiply-adds of convolutions, linear layers and attention products for one image; the rest is free.

    Attention over N queries and M keys with H heads of size D: softmax 2 H N M D; linear H (N + M) F D to build and read the
    state, and H N F for each stream's normalizer; key weights add H M F, a contrast H N D, the mixing of P block states
    H P^2 F D. The model may be on any device, also "meta" (without arithmetic then).
    """
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += output[0].numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            total += output[0].numel() * module.in_features
        elif isinstance(module, Attention):
            total += attention_multiply_adds(module, *_grid(inputs))

    watched = (nn.Conv2d, nn.Linear, Attention)
    handles = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, watched)]
    parameter = next(model.parameters())
    was_training = model.training
    channels = getattr(model, "in_chans", 3)
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, *image_size, device=parameter.device, dtype=parameter.dtype))
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return total


def attention_multiply_adds(layer: Attention, height: int, width: int) -> int:
    """Return the multiply-adds of the products of queries, keys and values of one layer on a grid of tokens."""
    if layer.config.window:
        windows = Windows((height, width), size=layer.config.window, shifted=layer.config.shifted)
        return windows.count * _pair_multiply_adds(layer, windows.tokens, windows.tokens)
    size = layer.config.key_reduction
    return _pair_multiply_adds(layer, height * width, -(-height // size) * -(-width // size))


def _pair_multiply_adds(layer: Attention, queries: int, keys: int) -> int:
    if layer.map is None:
        return 2 * queries * keys * layer.dim
    # map one token of zeros to get the feature size
    probe = torch.zeros(1, 1, layer.num_heads, layer.head_dim, device=layer.projection.weight.device)
    features = layer.map.given(probe, probe, key_mask=None, causal=False).key(probe).shape[-1]
    total = (queries + keys) * features * layer.dim + layer.num_heads * queries * features * layer.map.streams
    total += layer.num_heads * keys * features if layer.config.key_weight != "none" else 0
    if layer.config.num_states > 1:
        total += layer.config.num_states**2 * features * layer.dim
    return total + (queries * layer.dim if layer.config.contrast != "none" else 0)


def _grid(inputs: tuple) -> tuple[int, int]:
    """Return the grid in an attention layer's arguments, or a single row of tokens."""
    tokens, grid = inputs[0], inputs[1] if len(inputs) > 1 else None
    return grid if grid is not None else (1, tokens.shape[1])
