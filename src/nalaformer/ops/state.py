"""Hold the state of linear attention: sums over the keys and values so far."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearState:
    """Hold the sums over the tokens seen so far; their size does not depend on the number of tokens.

    state: [B, H, F, V]   sum_j rot(phi_k(k_j)) v_j^T * exp(-log_scale)
    key_sum: [B, H, F]    sum_j phi_k(k_j) * exp(-log_scale)
    count: [B] int64      visible tokens
    log_scale: [B, H]     0 unless a key was so large that its features would overflow

    float32 (float64 for float64 inputs) whatever the inputs are: a bfloat16 sum stops growing after a few hundred keys.
    """

    state: Tensor
    key_sum: Tensor
    count: Tensor
    log_scale: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        features: int,
        values: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LinearState":
        """Return the state before the first token."""
        return cls(
            torch.zeros(batch, heads, features, values, dtype=dtype, device=device),
            torch.zeros(batch, heads, features, dtype=dtype, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(batch, heads, dtype=dtype, device=device),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name, as a checkpoint of the state holds them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> "LinearState":
        return LinearState(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def detach(self) -> "LinearState":
        """Cut the gradient, as truncated back-propagation through time does between chunks."""
        return LinearState(**{name: tensor.detach() for name, tensor in self.tensors().items()})

    def select(self, samples: Tensor | Sequence[int]) -> "LinearState":
        """Return the states of some samples, in that order and with repetitions, as beam search needs."""
        index = torch.as_tensor(samples, dtype=torch.int64, device=self.state.device)
        return LinearState(**{name: tensor.index_select(0, index) for name, tensor in self.tensors().items()})

    def split(self, sizes: int | list[int]) -> list["LinearState"]:
        """Split along the batch; `LinearState.cat` joins the parts again."""
        parts = [tensor.split(sizes) for tensor in self.tensors().values()]
        return [LinearState(*part) for part in zip(*parts, strict=True)]

    def split_heads(self, sizes: int | list[int]) -> list["LinearState"]:
        """Split along the heads, as tensor parallelism does; every part has the same count."""
        parts = zip(self.state.split(sizes, 1), self.key_sum.split(sizes, 1), self.log_scale.split(sizes, 1), strict=True)
        return [replace(self, state=state, key_sum=key_sum, log_scale=scale) for state, key_sum, scale in parts]

    @staticmethod
    def cat(states: Sequence["LinearState"]) -> "LinearState":
        """Join along the batch."""
        if not states:
            raise ValueError("states join only if there is at least one, got none; LinearState.empty makes an empty one")
        for state in states:
            if state.state.shape[1:] != states[0].state.shape[1:]:
                raise ValueError(
                    f"states join along the batch only if heads, features and values agree, got {tuple(states[0].state.shape)} "
                    f"and {tuple(state.state.shape)}; all must come from the same layer"
                )
        columns = zip(*(state.tensors().values() for state in states), strict=True)
        return LinearState(*(torch.cat(column) for column in columns))

    @staticmethod
    def merge(a: "LinearState", b: "LinearState") -> "LinearState":
        """Return the state after the tokens of a and those of b. Order does not matter; the empty state changes nothing."""
        if a.state.shape != b.state.shape:
            raise ValueError(
                f"states merge only if batch, heads, features and values agree, got {tuple(a.state.shape)} and "
                f"{tuple(b.state.shape)}; both must come from the same layer and batch"
            )
        log_scale = torch.maximum(a.log_scale, b.log_scale)
        keep_a, keep_b = (a.log_scale - log_scale).exp(), (b.log_scale - log_scale).exp()
        return LinearState(
            a.state * keep_a[..., None, None] + b.state * keep_b[..., None, None],
            a.key_sum * keep_a[..., None] + b.key_sum * keep_b[..., None],
            a.count + b.count,
            log_scale,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in self.tensors().items()}, path)

    @staticmethod
    def load(path: str | PathLike[str], device: str = "cpu") -> "LinearState":
        """Read a file that `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(path, device=device)
        except SafetensorError as error:
            raise ValueError(f"a state must be a whole file that LinearState.save wrote, got {path}: {error}") from error
        names = [field.name for field in fields(LinearState)]
        if sorted(found) != sorted(names):
            raise ValueError(
                f"a state must be a file that LinearState.save wrote, with {', '.join(names)}, "
                f"got {', '.join(sorted(found)[:4])} in {path}"
            )
        return LinearState(**found)
