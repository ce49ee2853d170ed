"""Attention maps of a token over the image: in one layer, and through all layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import compute_dtype
from .layers import attention_layers, record
from .records import Grid, LayerRecord

Token = tuple[int, int] | int | str
"""(row, column) in the grid of the layer, the number of a token, "mean" of all tokens of the grid, or "class" for the first."""


def attention_map(
    model: nn.Module, image: Tensor, *, token: Token = "mean", layer: str | int = -1, head: int | None = None
) -> Tensor:
    """Return the shares of attention that a token gives to each place of the image: [h, w], sum one without the prefix.

    image: [3, H, W] or [1, 3, H, W]. layer: a name, or a number in the order of `attention_layers`. head: None is the mean.
    """
    images = as_images(image)
    if len(images) != 1:
        raise ValueError(f"attention_map takes one image, got {len(images)}; record them and use map_of")
    layers = attention_layers(model)
    if isinstance(layer, int) and not -len(layers) <= layer < len(layers):
        raise ValueError(
            f"layer must be a name or a number below {len(layers)}, the attention layers of the model, got {layer}"
        )
    name = layers[layer].name if isinstance(layer, int) else layer
    return map_of(record(model, images, [name])[0], token, head=head)[0]


def as_images(image: Tensor) -> Tensor:
    """Return an image or a batch as [B, channels, H, W]."""
    if not isinstance(image, Tensor) or not image.is_floating_point():
        kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(
            f"image must be a tensor of floats, as the model takes it, got {kind}; scale and normalise it as for the model "
            "(pixels: image.float() / 255)"
        )
    if image.dim() not in (3, 4):
        raise ValueError(f"image must be [channels, height, width] or a batch of them, got shape {tuple(image.shape)}")
    return image if image.dim() == 4 else image[None]


def map_of(found: LayerRecord, token: Token, *, head: int | None = None) -> Tensor:
    """Return the attention map of a token in a record: [B, h, w]."""
    if head is not None and not 0 <= head < found.num_heads:
        raise ValueError(f"head must be below the {found.num_heads} heads of {found.name}, got {head}")
    pulled = found.pull(start_at(found, token))  # [B, H, M]
    return as_map(pulled.mean(1) if head is None else pulled[:, head], found.key_grid, found)


def rollout(records: Sequence[LayerRecord], token: Token = "mean") -> Tensor:
    """Return the flow to a token of the last layer from each place of the first, through attention and residuals: [B, h, w].

    From the last layer to the first, v <- (v A + v) / 2, A the mean of the heads' shares (Abnar and Zuidema, 2020): one vector
    per sample, never a matrix. Between grids of different size the amount of a coarse cell is spread evenly over its fine
    cells. `token` belongs to the last layer. The map has the grid of the first layer, without its prefix.
    """
    if not records:
        raise ValueError("a rollout needs the records of at least one layer, got none")
    amounts = start_at(records[-1], token)
    for after, found in zip([None, *records[:0:-1]], records[::-1], strict=True):
        if after is not None:
            amounts = move_amounts(amounts, after, found)
        amounts = (amounts + spread_keys(found.pull(amounts).mean(1), found)) / 2
    return as_map(amounts, records[0].grid, records[0])


def start_at(found: LayerRecord, token: Token) -> Tensor:
    """Return [B, N] with 1 at the token, or shared by all tokens of the grid."""
    amounts = torch.zeros(found.batch, found.num_tokens, dtype=compute_dtype(found.q), device=found.q.device)
    if token == "mean":
        amounts[:, found.prefix :] = 1 / (found.num_tokens - found.prefix)
        return amounts
    if token == "class":
        if not found.prefix:
            raise ValueError(f'{found.name} has no class token; choose a place (row, column) or "mean"')
        token = 0
    if isinstance(token, str) or (isinstance(token, tuple) and len(token) != 2):
        raise ValueError(f'a token is (row, column), a number, "mean" or "class", got {token!r}')
    number = found.token_at(*token) if isinstance(token, tuple) else token
    if not 0 <= number < found.num_tokens:
        raise ValueError(f"the token must be below the {found.num_tokens} tokens of {found.name}, got {number}")
    amounts[:, number] = 1
    return amounts


def spread_keys(amounts: Tensor, found: LayerRecord) -> Tensor:
    """Move amounts on the keys [B, M] to the tokens [B, N] that the keys were made of."""
    if found.num_keys == found.num_tokens:
        return amounts
    if found.grid is None or found.key_grid is None:
        raise ValueError(
            f"{found.name} has {found.num_keys} keys for {found.num_tokens} tokens, and no grid says which is where"
        )
    return spread_evenly(amounts, found.key_grid, found.grid)


def move_amounts(amounts: Tensor, after: LayerRecord, before: LayerRecord) -> Tensor:
    """Move amounts [B, N] from a later layer's tokens to those of the layer before."""
    if after.num_tokens == before.num_tokens and after.prefix == before.prefix:
        return amounts
    if after.grid is None or before.grid is None:
        raise ValueError(
            f"{before.name} has {before.num_tokens} tokens and {after.name} {after.num_tokens}, and no grid says which is where"
        )
    prefix = amounts[:, : after.prefix]
    lost = prefix.new_zeros(len(prefix), max(0, before.prefix - after.prefix))
    prefix = torch.cat((prefix, lost), dim=1)[:, : before.prefix]
    return torch.cat((prefix, spread_evenly(amounts[:, after.prefix :], after.grid, before.grid)), dim=1)


def spread_evenly(amounts: Tensor, coarse: Grid, fine: Grid) -> Tensor:
    """Share the amount of each coarse cell evenly among the fine cells that it covers: [B, n] -> [B, N], same sum.

    A fine cell belongs to the coarse cell that holds its center; strides round up, so the last cells may cover fewer.
    """
    strides = [max(1, -(-f // c)) for c, f in zip(coarse, fine, strict=True)]
    rows, columns = (
        (torch.arange(side, device=amounts.device) // stride).clamp(max=limit - 1)
        for side, stride, limit in zip(fine, strides, coarse, strict=True)
    )
    index = (rows[:, None] * coarse[1] + columns).flatten()
    covered = torch.bincount(index, minlength=coarse[0] * coarse[1]).to(amounts.dtype)
    return (amounts / covered.clamp(min=1))[:, index]


def as_map(amounts: Tensor, grid: Grid | None, found: LayerRecord) -> Tensor:
    """Return [B, N] as a map [B, h, w], without the prefix, scaled to sum to one."""
    if grid is None:
        raise ValueError(f"{found.name} has no grid: its tokens are no image; use rows")
    inside = amounts[:, found.prefix :]
    return (inside / inside.sum(1, keepdim=True).clamp(min=1e-30)).unflatten(1, grid)


def enlarge(heat: Tensor, size: Grid) -> Tensor:
    """Enlarge a map [B, h, w] to the pixels of the image, [B, H, W], without smoothing."""
    return F.interpolate(heat[:, None], size=size, mode="nearest")[:, 0]
