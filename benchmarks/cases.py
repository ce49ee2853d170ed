"""The sizes that are measured, and their inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nalaformer.registry import unknown_name


@dataclass(frozen=True, kw_only=True)
class Case:
    """Attention of N tokens with themselves: B samples, H heads of size D; or of the last of N tokens alone, in decoding."""

    batch: int
    heads: int
    tokens: int
    head_dim: int = 64
    causal: bool = False
    step: bool = False
    """One step of decoding: the query of the last token; what is known of the tokens before it is ready."""
    beside_softmax: bool = False
    """Only ours and torch's softmax attention are measured: the size asks which of the two is faster there."""
    eager: bool = False
    """On a GPU: what an eager call takes of the host, whose work for small inputs exceeds that of the device."""

    @property
    def op(self) -> str:
        kind = "decoding step" if self.step else f"{'causal' if self.causal else 'bidirectional'} attention"
        return f"{kind}, eager call" if self.eager else kind

    @property
    def shape(self) -> str:
        kind = " step" if self.step else " causal" if self.causal else ""
        return f"B{self.batch} H{self.heads} N{self.tokens} D{self.head_dim}{kind}{' eager' if self.eager else ''}"

    def least_bytes(self, dtype: torch.dtype, *, backward: bool) -> int:
        """Return the least memory traffic: q, k, v and the output; backward also five tensors in and three gradients out."""
        tensor = self.batch * self.heads * self.tokens * self.head_dim * dtype.itemsize
        return (4 + 7 * backward) * tensor

    def inputs(self, *, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
        """Standard normal q, k, v and a gradient for the output, each [B, N, H, D]. Of a step q and the gradient have one
        token."""
        # drawn where they are used: half a billion numbers take a CPU longer than all that is measured with them
        generator = torch.Generator(device).manual_seed(seed)
        queries = 1 if self.step else self.tokens
        return tuple(
            torch.randn(self.batch, tokens, self.heads, self.head_dim, generator=generator, device=device).to(dtype)
            for tokens in (queries, self.tokens, self.tokens, queries)
        )


# one head group at growing length: how time and memory grow is read from these
GROWTH = tuple(Case(batch=1, heads=4, tokens=tokens) for tokens in (4096, 16384, 65536, 262144))
# shorter ones, where exact softmax attention may still be faster
SHORT = tuple(Case(batch=1, heads=4, tokens=tokens) for tokens in (256, 1024))
# large heads, and short inputs in many samples, where linear attention has least to save
UNTUNED = tuple(
    Case(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, causal=causal, beside_softmax=True)
    for batch, heads, tokens, head_dim, causal in (
        (16, 16, 1024, 72, False),
        (32, 16, 1024, 80, False),
        (8, 16, 1024, 96, False),
        (8, 16, 1024, 128, False),
        (4, 32, 4096, 128, True),
        (256, 3, 49, 64, False),
        (256, 3, 197, 64, False),
        (128, 12, 197, 64, False),
    )
)
EAGER = tuple(Case(batch=2, heads=4, tokens=197, causal=causal, beside_softmax=True, eager=True) for causal in (False, True))

CASES = {
    "cpu": (
        *GROWTH,
        Case(batch=4, heads=1, tokens=3136),
        Case(batch=4, heads=2, tokens=784),
        Case(batch=1, heads=4, tokens=4096, causal=True),
        Case(batch=1, heads=16, tokens=8192, step=True),
    ),
    "cuda": (
        *SHORT,
        *GROWTH,
        Case(batch=64, heads=1, tokens=3136),
        Case(batch=64, heads=2, tokens=784),
        Case(batch=1, heads=4, tokens=69696),
        Case(batch=1, heads=8, tokens=262144),
        Case(batch=4, heads=16, tokens=8192, causal=True),
        Case(batch=1, heads=16, tokens=131072, causal=True),
        Case(batch=1, heads=8, tokens=65536, head_dim=128, causal=True),
        *UNTUNED,
        *EAGER,
        Case(batch=1, heads=16, tokens=8192, step=True),
        Case(batch=32, heads=16, tokens=8192, step=True),
    ),
}
QUICK = (*GROWTH[:2], Case(batch=1, heads=1, tokens=3136))
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def check_device(device: str) -> None:
    if device not in DTYPES:
        raise ValueError(f"device must be one of {', '.join(DTYPES)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device was found, got device 'cuda'; use --device cpu")


def cases_for(device: str, *, quick: bool = False, shapes: Sequence[str] = ()) -> tuple[Case, ...]:
    """The cases of a device; `quick` is a look in under a minute or two. shapes: only those, as a row of the CSV names them."""
    check_device(device)
    known = {case.shape: case for case in (QUICK if quick else CASES[device])}
    for shape in shapes:
        if shape not in known:
            raise unknown_name("shape", shape, known)
    return tuple(known[shape] for shape in shapes or known)
