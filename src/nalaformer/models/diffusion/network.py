"""The diffusion transformer (DiT) on patches of a noisy image, given time and class, with any attention of the library."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...attention import Attention, AttentionConfig, configure
from ...field_types import check_side
from ...ops.kept_tensors import kept
from ...registry import unknown_name

# depth, channels, heads; the DiT paper's table 1
SIZES = {"s": (12, 384, 6), "b": (12, 768, 12), "l": (24, 1024, 16), "xl": (28, 1152, 16)}
PATCH_SIZES = (2, 4, 8)
LAYOUTS: dict[str, dict[str, int]] = {
    f"dit_{size}{patch}": {"depth": depth, "dim": dim, "num_heads": heads, "patch_size": patch}
    for size, (depth, dim, heads) in SIZES.items()
    for patch in PATCH_SIZES
}
TIME_FREQUENCIES = 256
# sin-cos positions and times rotate at speeds BASE^-t
BASE = 10000.0


def layout_of(name: str) -> dict[str, int]:
    """Return depth, channels, heads and patch size of a name such as "dit_s2"."""
    if name not in LAYOUTS:
        raise unknown_name("diffusion transformer", name, LAYOUTS)
    return dict(LAYOUTS[name])


class DiffusionTransformer(nn.Module):
    """Predict from noisy images [B, C, H, W], times [B] in 0..1000 and labels [B] -> [B, C or 2 C, H, W].

    tokens = patches W + sin-cos positions; blocks with adaLN-Zero, c = embed(time) + embed(label); a linear layer back to
    pixels. H and W are any multiples of the patch size. With learned_variance the second C channels interpolate the variance
    of a denoising step between its bounds. In training each label becomes "no class" with probability class_dropout, for
    classifier-free guidance; class_dropout=0 removes "no class".
    """

    def __init__(
        self,
        *,
        depth: int,
        dim: int,
        num_heads: int,
        patch_size: int,
        channels: int = 4,
        num_classes: int = 1000,
        class_dropout: float = 0.1,
        learned_variance: bool = True,
        mlp_ratio: float = 4.0,
        attention: str = "nalaformer",
        attention_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("depth", depth),
            ("dim", dim),
            ("patch_size", patch_size),
            ("channels", channels),
            ("num_classes", num_classes),
        ):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, got {value!r}")
        if dim % 4:
            raise ValueError(f"dim must be a multiple of 4, sine and cosine of row and column, got {dim}")
        if not 0 <= class_dropout < 1:
            raise ValueError(f"class_dropout must be at least 0 and below 1, got {class_dropout}; DiT has 0.1")
        config = configure(attention, dict(attention_options or {}))
        if config.causal:
            raise ValueError("attention over an image must not be causal, got causal=True; remove it from attention_options")
        self.patch_size, self.channels, self.num_classes, self.class_dropout = patch_size, channels, num_classes, class_dropout
        self.out_channels = channels * (2 if learned_variance else 1)
        self.gradient_checkpointing = False
        self.patches = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.time = nn.Sequential(nn.Linear(TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.classes = nn.Embedding(num_classes + (1 if class_dropout else 0), dim)
        self.blocks = nn.ModuleList(
            ModulatedBlock(config, dim=dim, num_heads=num_heads, hidden=int(dim * mlp_ratio)) for _ in range(depth)
        )
        self.last_modulation = Modulation(dim, 2)
        self.pixels = nn.Linear(dim, patch_size**2 * self.out_channels)
        self._start()

    @property
    def no_class(self) -> int | None:
        """The label of images without a class; None if the network has no such label."""
        return self.num_classes if self.class_dropout else None

    @torch.no_grad()
    def _start(self) -> None:
        """Initialize as DiT does: every block is the identity, and the output is zero."""
        for linear in (module for module in self.modules() if isinstance(module, nn.Linear)):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        nn.init.xavier_uniform_(self.patches.weight.flatten(1))
        nn.init.zeros_(self.patches.bias)  # type: ignore[arg-type]
        for module in (self.classes, self.time[0], self.time[2]):
            nn.init.normal_(module.weight, std=0.02)  # type: ignore[arg-type]
        nn.init.zeros_(self.pixels.weight)
        for module in self.modules():
            if isinstance(module, Modulation):
                nn.init.zeros_(module.linear.weight)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return self.predict(images, times, labels)

    def predict(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Predict as the class describes. Samplers call this, since a subclass may have another forward."""
        grid = self._checked_grid(images, times, labels)
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        positions = cached_positions(*grid, tokens.shape[-1], device=tokens.device)
        # under autocast the sum over the blocks keeps the precision of the weights
        tokens = tokens + positions.to(self.patches.weight.dtype)
        condition = self.time(time_waves(times).to(self.classes.weight.dtype)) + self.classes(self._drop_classes(labels))
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(block, tokens, condition, grid, use_reentrant=False)
            else:
                tokens = block(tokens, condition, grid)
        shift, scale = self.last_modulation(condition)
        return as_pixels(self.pixels(modulate(tokens, shift, scale)), grid, self.patch_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of retaining their activations."""
        self.gradient_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of position tables and of parameters of feature maps (powers, scales, angles)."""
        return {name for name, _ in self.named_parameters() if set(name.split(".")[:-1]) & {"table", "map"}}

    def check_labels(self, labels: Tensor) -> None:
        """Reject labels out of range. This waits for the device, so samplers call it once and training never."""
        rows = self.classes.num_embeddings
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < rows:
            also = f", or {self.no_class} for no class" if self.class_dropout else ""
            raise ValueError(
                f"labels must lie in 0 .. {self.num_classes - 1}{also}, got {int(labels.min())} .. {int(labels.max())}; "
                "ask for a class that the network was made for, or make it with more (num_classes)"
            )

    def _drop_classes(self, labels: Tensor) -> Tensor:
        if not self.training or not self.class_dropout:
            return labels
        return labels.masked_fill(torch.rand(labels.shape, device=labels.device) < self.class_dropout, self.num_classes)

    def _checked_grid(self, images: Tensor, times: Tensor, labels: Tensor) -> tuple[int, int]:
        if images.dim() != 4 or images.shape[1] != self.channels:
            raise ValueError(f"images must be [batch, {self.channels}, height, width], got {tuple(images.shape)}")
        if times.shape != images.shape[:1] or labels.shape != images.shape[:1]:
            raise ValueError(
                f"times and labels must be [batch], one for each of {len(images)} images, got {tuple(times.shape)} and "
                f"{tuple(labels.shape)}"
            )
        check_size(images.shape[2], images.shape[3], self.patch_size)
        return images.shape[2] // self.patch_size, images.shape[3] // self.patch_size


class ModulatedBlock(nn.Module):
    """x += gate1 * attention(modulate(norm x)); x += gate2 * feed_forward(modulate(norm x)): adaLN-Zero, tokens [B, N, C]."""

    def __init__(self, attention: AttentionConfig, *, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.modulation = Modulation(dim, 6)
        self.attention = Attention(attention, dim=dim, num_heads=num_heads)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, condition: Tensor, grid: tuple[int, int]) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)
        x = torch.addcmul(x, gate1, self.attention(modulate(x, shift1, scale1), grid).to(x.dtype))
        hidden = F.gelu(self.fc1(modulate(x, shift2, scale2)), approximate="tanh")
        return torch.addcmul(x, gate2, self.fc2(hidden).to(x.dtype))


class Modulation(nn.Module):
    """Map a condition [B, C] to `count` vectors [B, 1, C], all zero at initialization."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(dim, count * dim)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(condition))[:, None].chunk(self.count, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return norm(x) (1 + scale) + shift over the channels."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def as_pixels(tokens: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """Return tokens as images, [B, N, p p C] -> [B, C, H p, W p]; a pixel's channels are adjacent in its token, as in DiT."""
    image = tokens.unflatten(2, (patch_size, patch_size, -1)).unflatten(1, grid)  # [B, H, W, p, q, C]
    return image.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def time_waves(times: Tensor) -> Tensor:
    """Return cos and sin of the times [B] at 128 frequencies, float32 [B, 256]."""
    speeds = BASE ** (-torch.arange(TIME_FREQUENCIES // 2, device=times.device, dtype=torch.float32) / (TIME_FREQUENCIES // 2))
    angles = times.float()[:, None] * speeds
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def sin_cos_positions(height: int, width: int, dim: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return [height * width, dim]: sines and cosines of the column in the first half, of the row in the second, as in DiT."""
    # the published tables were computed in float64, which Apple GPUs lack
    precise = torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64
    speeds = BASE ** (-torch.arange(dim // 4, dtype=precise, device=device) / (dim // 4))

    def waves(count: int) -> Tensor:
        angles = torch.arange(count, dtype=precise, device=device)[:, None] * speeds
        return torch.cat((angles.sin(), angles.cos()), dim=-1)

    rows, columns = waves(height)[:, None], waves(width)[None]
    both = torch.cat((columns.expand(height, -1, -1), rows.expand(-1, width, -1)), dim=-1)
    return both.flatten(0, 1).float()


# every step of a sampler uses them
cached_positions: Callable[..., Tensor] = kept(sin_cos_positions, maxsize=16)


def check_size(height: int, width: int, patch_size: int) -> None:
    check_side("height and width", (height, width))
    if height < 1 or width < 1 or height % patch_size or width % patch_size:
        raise ValueError(
            f"height and width must be positive multiples of the patch size, {patch_size}, got {height} x {width}; "
            f"the nearest is {nearest(height, patch_size)} x {nearest(width, patch_size)}"
        )


def nearest(side: int, patch_size: int) -> int:
    return max(1, round(side / patch_size)) * patch_size
