"""Compute rotary positions (RoPE) from positions, without tables of a fixed size."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .exporting import is_exporting, is_jit_tracing
from .kept_tensors import is_captured, is_traced


def rotary_frequencies(
    num_pairs: int, *, base: float = 10000.0, inclusive: bool = False, device: torch.device | str | None = None
) -> Tensor:
    """Return the frequencies base^-t of the channel pairs, float64 [P] (float32 on Apple GPUs).

    t runs over [0, 1), the usual form for text. With `inclusive` it runs over [0, 1], the form of the published vision models.
    """
    if not isinstance(base, (int, float)) or not 0 < base < math.inf:
        raise ValueError(f"the base of a rotary must be positive and finite, got {base!r}; 10000 is the usual one")
    # made on its own device: a copy from the host would make the host wait
    precise = torch.float32 if device is not None and torch.device(device).type == "mps" else torch.float64
    if inclusive:
        t = torch.linspace(0.0, 1.0, num_pairs, dtype=precise, device=device)
    else:
        t = torch.arange(num_pairs, dtype=precise, device=device) / num_pairs
    return base**-t


def length_of(x: Tensor) -> Tensor:
    """Return the norm over the last dimension. Its gradients of any order are zero where it is; torch's second one is NaN."""
    # a recorded program is the same with and without gradients
    if torch.is_grad_enabled() and not is_jit_tracing():
        is_zero = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True) == 0
        x = torch.where(is_zero, x.detach(), x)
    return torch.linalg.vector_norm(x, dim=-1)


def check_positions(**numbers: int) -> None:
    # sizes are tensors in torch.jit.trace
    if is_jit_tracing():
        return
    for name, number in numbers.items():
        # sizes are symbols while a program is exported
        if not isinstance(number, (int, torch.SymInt)) or number < 0:
            raise ValueError(f"{name} must be a whole number, at least 0, got {number!r}")


@dataclass(frozen=True)
class Rotary:
    """Hold the position of each token, and the frequency of each channel pair.

    positions: [N, A] or [B, N, A], A axes (1 for text, 2 for images).
    frequencies: [P]; axis a rotates the pairs a*P .. (a+1)*P - 1, pair i = channels (2i, 2i+1). So dim = 2*A*P channels
    rotate; features of a multiple of that size are rotated in groups of dim, each group alike.

    The default is the published form: rotation in the numerator of attention only. Its weights can be negative and do not sum
    to one. `normalised=True` is a form of this library whose weights are >= 0 and sum to one: each channel pair (a, b) also
    contributes its length |(a, b)|, so that a pair's product becomes |x||y|(1 + cos angle) >= 0, in the numerator and the
    denominator alike. It makes the features 1.5 times as wide.
    """

    positions: Tensor
    frequencies: Tensor
    normalised: bool = False

    def __post_init__(self) -> None:
        for name, x in (("positions", self.positions), ("frequencies", self.frequencies)):
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"rotary {name} must be a torch tensor, got {type(x).__name__}; convert it with torch.as_tensor()"
                )
        if self.frequencies.dim() != 1:
            raise ValueError(f"rotary frequencies must be [pairs], got shape {tuple(self.frequencies.shape)}")
        if not isinstance(self.normalised, bool):
            raise TypeError(f"normalised must be True or False, got {self.normalised!r}")
        if self.positions.dim() not in (2, 3):
            raise ValueError(
                f"rotary positions must be [N, axes] or [B, N, axes], got shape {tuple(self.positions.shape)}; "
                "use Rotary.sequence, Rotary.grid or Rotary.packed to make them"
            )

    @classmethod
    def sequence(
        cls,
        num_tokens: int,
        dim: int,
        *,
        start: int = 0,
        base: float = 10000.0,
        normalised: bool = False,
        device: torch.device | str | None = None,
    ) -> "Rotary":
        """Return the positions start, start+1, ... of one sequence; dim channels are rotated, dim even."""
        if not isinstance(dim, int) or dim < 1 or dim % 2:
            raise ValueError(f"1-D rotary needs an even number of channels, got {dim}; choose an even head_dim")
        check_positions(num_tokens=num_tokens, start=start)
        positions = torch.arange(start, start + num_tokens, device=device)[:, None]
        return cls(positions, rotary_frequencies(dim // 2, base=base, device=positions.device), normalised)

    @classmethod
    def grid(
        cls,
        height: int,
        width: int,
        dim: int,
        *,
        base: float = 10000.0,
        normalised: bool = False,
        device: torch.device | str | None = None,
    ) -> "Rotary":
        """Return the height*width positions of an image, row by row; half of dim rotates with the row, half with the column."""
        if not isinstance(dim, int) or dim < 1 or dim % 4:
            raise ValueError(f"2-D rotary needs channels in multiples of 4, got {dim}; choose head_dim divisible by 4")
        check_positions(height=height, width=width)
        rows = torch.arange(height, device=device)[:, None].expand(height, width)
        columns = torch.arange(width, device=device)[None, :].expand(height, width)
        positions = torch.stack((rows, columns), dim=-1).reshape(height * width, 2)
        return cls(positions, rotary_frequencies(dim // 4, base=base, inclusive=True, device=positions.device), normalised)

    @classmethod
    def packed(cls, cu_seqlens: Tensor, dim: int, *, base: float = 10000.0, normalised: bool = False) -> "Rotary":
        """Return the positions of packed sequences, which start at 0 in each."""
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            got = (
                f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            )
            raise ValueError(
                f"cu_seqlens must be a tensor of integers [sequences + 1], got {got}; for lengths 3 and 5 it is "
                "torch.tensor([0, 3, 8])"
            )
        lengths = cu_seqlens.diff()
        starts = torch.repeat_interleave(cu_seqlens[:-1], lengths)
        one_sequence = cls.sequence(int(cu_seqlens[-1]), dim, base=base, normalised=normalised, device=cu_seqlens.device)
        return replace(one_sequence, positions=one_sequence.positions - starts[:, None])

    @property
    def dim(self) -> int:
        return 2 * self.positions.shape[-1] * self.frequencies.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-2]

    def tokens(self, start: int, stop: int) -> "Rotary":
        """Return the rotary of tokens start .. stop - 1 only."""
        return replace(self, positions=self.positions[..., start:stop, :])

    def select(self, rows: Tensor) -> "Rotary":
        """Return the rotary of some tokens only."""
        return replace(self, positions=self.positions.index_select(-2, rows))

    def flat(self) -> "Rotary":
        """Return the rotary for the tokens of all samples back to back: positions [B, N, A] become [B * N, A]."""
        return self if self.positions.dim() == 2 else replace(self, positions=self.positions.flatten(0, 1))

    def cos_sin(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles, each [N, A*P] or [B, N, A*P]."""
        # float64 angles: at position 262,144 a float32 angle is off by 0.02 radian. ONNX runtimes and Apple GPUs lack
        # float64 trigonometry, and images have small positions
        lacks_double = is_exporting() or self.positions.device.type == "mps"
        precise = torch.float32 if lacks_double else torch.float64
        angles = self.positions[..., None].to(precise) * self.frequencies.to(self.positions.device, precise)
        angles = angles.flatten(-2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the float32 cosine and sine that the kernels read; cached, so that a network's layers compute them once."""
        if is_traced():
            return self._new_tables()
        known: tuple[Tensor, Tensor] | None = self.__dict__.get("_tables")
        if known is None:
            # outside inference mode, because training may use the same positions later
            with torch.inference_mode(False):
                known = self._new_tables()
            if not is_captured(self.positions.device):
                self.__dict__["_tables"] = known
        return known

    def _new_tables(self) -> tuple[Tensor, Tensor]:
        # positions may be a transposed view, and the angles have their strides
        cos, sin = self.cos_sin(torch.float32)
        return cos.contiguous(), sin.contiguous()

    def rotate(self, features: Tensor) -> Tensor:
        """Rotate the channel pairs of features [B, N, H, F]; with `normalised`, append the pair lengths: [B, N, H, 1.5 F]."""
        if features.shape[-1] % self.dim:
            raise ValueError(
                f"the feature size must be a multiple of the rotary's channels ({self.dim}), got {features.shape[-1]}; "
                "make the rotary for the head size or the feature size of the map"
            )
        cos, sin = self.cos_sin(features.dtype)
        cos, sin = cos[..., None, None, :], sin[..., None, None, :]  # [(B,) N, 1, 1, dim/2]
        pairs = features.unflatten(-1, (features.shape[-1] // self.dim, self.dim // 2, 2))
        even, odd = pairs.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-3)
        if not self.normalised:
            return rotated
        return torch.cat((rotated, length_of(pairs).flatten(-2)), dim=-1)
