"""Token filters: blocks of a vision model skip the least attended tokens, which keep their values."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..attention.cells import cells_at, put_back
from ..ops import received_attention
from ..registry import unknown_name
from .adapters import TimmAttention

RULES = ("attention", "random")
# blocks of timm whose attention gets norm1(x), then those whose attention gets x
NORM_FIRST = ("timm.models.vision_transformer.Block", "timm.models.eva.EvaBlock")
NORM_LAST = ("timm.models.vision_transformer.ResPostBlock", "timm.models.eva.EvaBlockPostNorm")
PLAIN_ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")


class TokenFilter:
    """The filter of a model: `remove` removes it, `kept` holds the tokens that each stage or block kept in the last pass."""

    def __init__(self, *, by: str) -> None:
        self.by = by
        self.kept: dict[int, Tensor] = {}
        """Indices of the kept tokens, [B, n] in ascending order, by stage or block."""
        self._handles: list[Any] = []
        self._choices = Choices()

    def remove(self) -> None:
        """Restore the model without the filter."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Choices:
    """The kept tokens of every tensor that is still in memory.

    Gradient checkpointing runs a block again with the tensor of its first pass, while other passes may have chosen since. A
    tensor is found by its memory address, which copies without history share.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, Tensor]] = {}

    def remember(self, x: Tensor, kept: Tensor) -> None:
        memory = _storage_reference(x)
        if memory is not None:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._known[memory.cdata, int(x.storage_offset())] = memory, kept

    def lookup(self, x: Tensor) -> Tensor | None:
        memory = _storage_reference(x)
        # the weak reference keeps the address from being reused for another tensor
        known = None if memory is None else self._known.get((memory.cdata, int(x.storage_offset())))
        return None if known is None else known[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Choices":
        return Choices()


def _storage_reference(x: Tensor) -> StorageWeakRef | None:
    """Return the tensor's memory; None in compiled code and torch.func, which never run a block twice on their own."""
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    return StorageWeakRef(x.untyped_storage())


def _is_in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@dataclass
class FilteredBlock:
    """Hooks around one block: choose tokens or reuse an earlier choice, and scatter them back after the block."""

    filter: TokenFilter
    start: int
    """The stage or block whose choice this block follows."""
    share: float
    prefix: int
    score: Callable[..., Tensor] | None
    """Computes the attention that each token receives; None: reuse the earlier choice."""
    is_ours: bool
    """True for our blocks, which take the kept tokens as an argument, since their convolutions see all tokens."""
    running: tuple[Tensor, Tensor] | None = None
    """All tokens, and the indices of those inside the block."""

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *rest = args
        kept = self.kept_tokens(block, x, *rest)
        self.running = x, kept
        return (x, *rest, kept) if self.is_ours else (cells_at(x, kept), *rest), kwargs

    def after(self, block: nn.Module, args: tuple[Any, ...], out: Tensor | None) -> Tensor | None:
        running, self.running = self.running, None
        # checkpointing stops a block by an exception once it has what it needs
        if running is None or out is None:
            return out
        whole, kept = running
        out = out if self.is_ours else put_back(whole, out, kept)
        self.filter._choices.remember(out, kept)
        return out

    def kept_tokens(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        """Return the tokens that this block chooses or reuses; in a backward pass, those of the forward pass of the same x."""
        is_again = _is_in_backward()
        kept = self.filter._choices.lookup(x) if is_again or self.score is None else None
        if kept is None and self.score is not None:
            kept = self.choose_tokens(x, self.score(block, x, *rest) if self.filter.by == "attention" else None)
        if kept is None and is_again:
            raise ValueError(
                "a filtered block that runs again in a backward pass needs the tensor of its forward pass, got another one; "
                "keep checkpointed activations on their device, or remove() the token filter"
            )
        if kept is None:
            kept = self.filter.kept[self.start]
        if not is_again:
            self.filter.kept[self.start] = kept
            self.filter._choices.remember(x, kept)
        return kept

    @torch.no_grad()
    def choose_tokens(self, x: Tensor, score: Tensor | None) -> Tensor:
        """Choose tokens, [B, n] in ascending order, at random without scores; prefix tokens are always kept."""
        tokens = x.shape[1] - self.prefix
        count = max(1, math.ceil(self.share * tokens))
        if score is None:
            score = torch.rand(x.shape[:2], device=x.device)
        best = score[:, self.prefix :].topk(count, dim=1).indices + self.prefix
        first = torch.arange(self.prefix, device=x.device).expand(len(x), -1)
        return torch.cat((first, best), dim=1).sort(dim=1).values


def filter_tokens(model: nn.Module, keep: Mapping[int, float], *, by: str = "attention") -> TokenFilter:
    """Run the blocks of a vision model on the most attended tokens only, in place; the returned filter undoes it.

    keep: the fraction of tokens to keep, by stage for our backbones (all blocks of that stage), by block for timm's plain
    ViTs (from that block on, until the next one named). The tokens that receive the most attention in the first of those
    blocks are kept, mean over heads: from the class token, or from all tokens if there is none. Class tokens always stay.
    by="random" is the baseline.

    The other tokens keep their values and return after every block, so feature maps stay complete, and a later choice may
    include them again. This works without training; training with it lets the model adapt. State dicts do not change.
    """
    if by not in RULES:
        raise unknown_name("rule of a token filter", by, RULES)
    groups, is_ours = _block_groups(model)
    if not isinstance(keep, Mapping):
        raise ValueError(
            f"keep names a share of tokens for each {'stage' if is_ours else 'block'}, such as {{1: 0.5}}, got {keep!r}"
        )
    for place, share in keep.items():
        if not isinstance(place, int) or place not in range(len(groups)):
            what = "stages" if is_ours else "blocks"
            raise ValueError(f"keep names {what} by number, 0 to {len(groups) - 1}, got {place!r}")
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(f"a share of tokens must be above 0 and at most 1, got {share!r} for {place}")
    found = TokenFilter(by=by)
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    current: int | None = None
    # everything is checked before the first hook, so that an error leaves the model unchanged
    plan: list[tuple[nn.Module, FilteredBlock]] = []
    for number, blocks in enumerate(groups):
        if number in keep:
            current = number
        elif is_ours:
            current = None
        if current is None or keep[current] == 1:
            continue
        for index, block in enumerate(blocks):
            score = _score_function(block, is_ours, prefix) if number in keep and index == 0 else None
            plan.append((block, FilteredBlock(found, current, keep[current], prefix, score, is_ours)))
    if any(is_filtered(block) for block, _ in plan):
        raise ValueError("a model takes one token filter at a time, got one that has another; call remove() of that one first")
    for block, around in plan:
        found._handles.append(block.register_forward_pre_hook(around.before, with_kwargs=True))
        found._handles.append(block.register_forward_hook(around.after, always_call=True))
    return found


def is_filtered(block: nn.Module) -> bool:
    """True if a token filter chooses the tokens of that block."""
    return any(isinstance(getattr(hook, "__self__", None), FilteredBlock) for hook in block._forward_pre_hooks.values())


def _block_groups(model: nn.Module) -> tuple[list[list[nn.Module]], bool]:
    """Return blocks by stage and True for our backbones; single blocks and False for plain ViTs."""
    stages, blocks = getattr(model, "stages", None), getattr(model, "blocks", None)
    if stages is not None and all(hasattr(stage, "blocks") for stage in stages):
        groups = [list(stage.blocks) for stage in stages]
        if all("kept" in inspect.signature(block.forward).parameters for group in groups for block in group):
            return groups, True
    if blocks is not None and all(hasattr(block, "attn") and hasattr(block, "norm1") for block in blocks):
        return [[block] for block in blocks], False
    raise ValueError(f"tokens can be filtered in our backbones and in timm's plain ViTs, got {type(model).__name__}")


def _score_function(block: Any, is_ours: bool, prefix: int) -> Callable[..., Tensor]:
    """Return a function score(block, x, ...) -> [B, N]."""
    if is_ours:
        config = block.attention.config
        if config.window or config.key_reduction > 1:
            raise ValueError(
                "tokens can be filtered where all of them see each other, got windows or reduced keys in this stage"
            )
        return lambda block, x, grid: block.received_attention(x, grid)
    attention = block.attn
    if isinstance(attention, TimmAttention):
        attended = _attended_in(block)
        return lambda block, x, *_: block.attn.attention.received_attention(attended(block, x), prefix=prefix)
    if not _is_instance_by_name(attention, PLAIN_ATTENTION):
        raise ValueError(f"no rule for the attention of {type(attention).__name__}; timm's plain ViT has one")
    return partial(_received_by_timm, attended=_attended_in(block), prefix=prefix)


def _attended_in(block: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Return a function attended(block, x) that gives the input of the block's attention."""
    if _is_instance_by_name(block, NORM_LAST):
        return lambda block, x: x
    if _is_instance_by_name(block, NORM_FIRST):
        return lambda block, x: block.norm1(x)
    raise ValueError(
        f"tokens can be scored in timm's {', '.join(name.rpartition('.')[2] for name in NORM_FIRST + NORM_LAST)}, got "
        f"{type(block).__name__}: it is not known whether its norm comes first; filter a model of those blocks"
    )


def _is_instance_by_name(module: nn.Module, classes: tuple[str, ...]) -> bool:
    """True for these classes and their subclasses, compared by name, so that timm need not be imported."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in classes for kind in type(module).__mro__)


@torch.no_grad()
def _received_by_timm(block: Any, x: Tensor, *_: Any, attended: Callable[[Any, Tensor], Tensor], prefix: int) -> Tensor:
    attention = block.attn
    x = attended(block, x)
    width = attention.qkv.out_features // 3
    sides = []
    # project queries and keys alone, and only the queries that are needed
    for number, tokens in enumerate((x[:, :prefix] if prefix else x, x)):
        rows = slice(number * width, (number + 1) * width)
        bias = None if attention.qkv.bias is None else attention.qkv.bias[rows]
        sides.append(F.linear(tokens, attention.qkv.weight[rows], bias).unflatten(-1, (attention.num_heads, -1)))
    q, k = attention.q_norm(sides[0]), attention.k_norm(sides[1])
    return received_attention(q, k, feature_map=None, scale=attention.scale)
