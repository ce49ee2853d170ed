"""Find the attention layers of a model, and record them in a pass."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..attention import Attention
from ..attention.hybrid import HybridAttention
from ..attention.windows import Groups, Windows
from ..conversion.token_filter import is_filtered
from ..feature_maps import FEATURE_MAPS
from .records import Grid, HybridRecord, LayerRecord, LinearRecord, SoftmaxRecord
from .torch_attention import fused_forward, is_readable

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """An attention layer of a model."""

    name: str
    """The name of the layer in the model."""
    kind: str
    """"softmax", "linear" or "hybrid"."""
    method: str
    """The name of the feature map, or the kind."""
    module: nn.Module = field(repr=False)


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return the attention layers of a model in the order of its modules: ours, converted, and softmax of other libraries.

    Delta rules are not listed: what they store of a token depends on later ones, so they have no weights.
    """
    found = [layer for name, module in model.named_modules() if (layer := _as_attention_layer(name, module)) is not None]
    # only the innermost of nested attention modules attends, except for the original inside a converted one
    hybrids = tuple(f"{layer.name.partition('.hybrid.groups.')[0]}." for layer in found if layer.kind == "hybrid")
    return [
        layer
        for layer in found
        if not any(other.name.startswith(f"{layer.name}.") for other in found)
        and not (layer.kind == "softmax" and layer.name.startswith(hybrids))
    ]


def _as_attention_layer(name: str, module: nn.Module) -> AttentionLayer | None:
    kind = method = "softmax"
    if isinstance(module, HybridAttention):
        kind = method = "hybrid"
    elif (isinstance(module, Attention) and module.map is not None) or _is_mixer(module, "LinearMixer"):
        kind, method = "linear", next(key for key in FEATURE_MAPS.names() if FEATURE_MAPS[key] is type(module.map))
    elif not isinstance(module, Attention) and not _is_mixer(module, "SoftmaxMixer") and not _is_foreign(module):
        return None
    return AttentionLayer(name=name, kind=kind, method=method, module=module)


def _is_foreign(module: nn.Module) -> bool:
    """True if it is attention of another library, by its name and its projections."""
    if type(module).__module__.startswith("nalaformer.") or "attention" not in type(module).__name__.lower():
        return False
    return any(isinstance(layer, nn.Linear) for layer in module.modules())


def _is_mixer(module: nn.Module, name: str) -> bool:
    """True if it is a mixer of our language models; a model with one has imported them."""
    mixers = sys.modules.get("nalaformer.models.language.mixers")
    return mixers is not None and isinstance(module, getattr(mixers, name))


def reject_earlier_tokens(layer: AttentionLayer, count: int) -> None:
    """Reject a cache with tokens, since a state does not hold their queries and keys."""
    if count:
        raise ValueError(
            f"attention is recorded of whole sequences, got a cache whose state in {layer.name} holds {count} tokens already; "
            "pass all tokens at once, without a cache"
        )


def record(model: nn.Module, inputs: Inputs, layers: Sequence[str] | None = None) -> list[LayerRecord]:
    """Run the model once, in evaluation mode and without gradients, and return a record of each attention layer.

    inputs: a tensor, a sequence of positional arguments, or a mapping of keyword arguments. layers: names, all by default.
    Memory is that of the queries and keys, linear in the number of tokens.
    """
    with torch.no_grad(), Recorder(model, layers, image=_image_size(inputs)) as recorder:
        call(model, inputs)
    return recorder.records


def call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


class Recorder(TorchFunctionMode):
    """A context that records the attention layers of a model, which is in evaluation mode meanwhile."""

    def __init__(
        self, model: nn.Module, layers: Sequence[str] | None = None, *, image: Grid | None = None, keep_values: bool = False
    ) -> None:
        super().__init__()
        known = attention_layers(model)
        if not known:
            raise ValueError(f"{type(model).__name__} has no attention layer that is known here; see attention_layers")
        for name in layers or ():
            if name not in [layer.name for layer in known]:
                raise ValueError(f"no attention layer {name!r}; there are {', '.join(layer.name for layer in known)}")
        self.model, self.image, self.keep_values = model, image, keep_values
        self.layers = [layer for layer in known if layers is None or layer.name in layers]
        filtered = tuple(f"{name}." for name, module in model.named_modules() if is_filtered(module))
        for layer in self.layers:
            if layer.name.startswith(filtered):
                raise ValueError(
                    f"attention is recorded where every token takes part, got {layer.name} under a token filter; take the "
                    "filter off with its remove(), or name other layers"
                )
            if isinstance(layer.module, nn.MultiheadAttention) and not is_readable(layer.module):
                raise ValueError(
                    f"attention is recorded of keys that are tokens, got {layer.name}, a MultiheadAttention with bias_k, "
                    "add_zero_attn or a forward of its own; name other layers"
                )
        self.records: list[LayerRecord] = []
        self._running: list[AttentionLayer] = []
        self._windows: dict[str, tuple[Tensor, Grid]] = {}
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> "Recorder":
        for module in self.model.modules():
            self._undo.append(partial(setattr, module, "training", module.training))
        self.model.eval()
        for layer in self.layers:
            self._listen(layer)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if error[0] is None and not self.records:
            raise ValueError(
                "no attention was seen: the layers attend by their own code; choose fused attention "
                "(timm: fused_attn, transformers: attn_implementation='sdpa')"
            )

    def _listen(self, layer: AttentionLayer) -> None:
        module: Any = layer.module
        if isinstance(module, Attention):
            self._replace(module, "attend", self._listen_to_ours(layer, module.attend))
        elif _is_mixer(module, "LinearMixer"):
            self._replace(module, "mix", self._listen_to_mixer(layer, module.mix))
        elif _is_mixer(module, "SoftmaxMixer"):
            self._replace(module, "forward", self._listen_to_softmax_mixer(module.forward))
        elif isinstance(module, HybridAttention):
            self._replace(module, "forward", self._listen_to_hybrid(layer, module.forward))
        # torch's fused function is seen by __torch_function__
        if isinstance(module, nn.MultiheadAttention):
            self._replace(module, "forward", fused_forward(module))
        if getattr(module, "fused_attn", None) is False:
            self._replace(module, "fused_attn", True)
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", "sdpa") == "eager":
            config._attn_implementation = "sdpa"
            self._undo.append(partial(setattr, config, "_attn_implementation", "eager"))
        begin = module.register_forward_pre_hook(lambda *_: self._running.append(layer))
        end = module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)
        self._undo += [begin.remove, end.remove]
        parent = self.model
        for step in layer.name.split(".")[:-1]:
            parent = parent.get_submodule(step)
            if type(parent).__name__ == "SwinTransformerBlock" and type(parent).__module__.startswith("timm."):
                swin = parent.register_forward_pre_hook(lambda block, inputs: self._note_swin(layer, block, inputs[0]))
                self._undo.append(swin.remove)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        known = name in module.__dict__
        before = module.__dict__.get(name)
        module.__dict__[name] = value
        self._undo.append(lambda: module.__dict__.__setitem__(name, before) if known else module.__dict__.pop(name, None))

    def _note_swin(self, layer: AttentionLayer, block: Any, x: Tensor) -> None:
        """Record which tokens lie in the windows of timm's Swin, which rolls first and pads then."""
        grid = (x.shape[1], x.shape[2])
        numbers = torch.arange(grid[0] * grid[1], device=x.device).view(grid)
        numbers = numbers.roll((-block.shift_size[0], -block.shift_size[1]), dims=(0, 1))
        height, width = block.window_size
        numbers = F.pad(numbers, (0, -grid[1] % width, 0, -grid[0] % height), value=-1)
        cells = numbers.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
        self._windows[layer.name] = (cells.flatten(2).flatten(0, 1), grid)

    # --- recorders of layers -------------------------------------------------------------------------------------------------

    def _listen_to_ours(self, layer: AttentionLayer, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        module: Any = layer.module

        def listen(
            q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_grid: Grid, key_mask: Any, groups: Any, log_decay: Any = None
        ) -> Tensor:
            seen = len(self.records)
            out = attend(q, k, v, grid, key_grid, key_mask, groups, log_decay)
            windows = None
            if module.config.window:
                layout = Windows(grid, size=module.config.window, shifted=module.config.shifted)
                groups, key_mask = layout.groups(q), layout.visible(key_mask, q)
                # number from 1, so that padding, which is 0, becomes -1
                windows = layout.split(torch.arange(1, grid[0] * grid[1] + 1, device=q.device)[None, :, None])[..., 0] - 1
                q, k = layout.split(q), layout.split(k)
            if module.map is None:
                for found in self.records[seen:]:
                    assert isinstance(found, SoftmaxRecord)
                    found.windows, found.heads_first, found.key_mask = windows, False, key_mask
                    # the mask hides these pairs already, but counts of visible keys read these fields
                    found.causal, found.block = module.config.causal, module.config.block
                    if self.keep_values:
                        found.values, found.gathered = v, out
                    self._place(found, layer, grid, key_grid)
                return out
            rotary = None
            if module.config.position == "rotary":
                channels = module.head_dim * (2 if module.config.rotary_over == "features" else 1)
                sides = (layout.shape, layout.shape) if module.config.window else (grid, key_grid)
                rotary = tuple(module._rotary(side, channels, q) for side in sides)
            found = LinearRecord(
                name=layer.name,
                method=layer.method,
                q=q.detach(),
                k=k.detach(),
                feature_map=module.map,
                rotary=rotary,
                causal=module.config.causal,
                block=module.config.block,
                key_mask=key_mask,
                groups=groups,
                windows=windows,
                contrast=module.op_contrast(q),
                weigh_keys=module.key_weights,
                mixing=module.pair_mixing(grid, key_grid, q),
                log_decay=log_decay,
                values=v,
                gathered=out,
            )
            self._add(found, layer, grid, key_grid)
            return out

        return listen

    def _listen_to_mixer(self, layer: AttentionLayer, mix: Callable[..., Tensor]) -> Callable[..., Tensor]:
        module: Any = layer.module

        def listen(x: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: Any, cache: Any) -> Tensor:
            reject_earlier_tokens(layer, 0 if cache is None else cache.seen)
            out = mix(x, q, k, v, tokens, cache)
            decay = module.log_decay(x)
            found = LinearRecord(
                name=layer.name,
                method=layer.method,
                q=q.detach(),
                k=for_heads(k, q).detach(),
                feature_map=module.map,
                rotary=tokens.rotary if module.has_rotary else None,
                causal=True,
                key_mask=tokens.key_mask,
                groups=packed_sequences(tokens.sequence),
                contrast=None if module.contrast is None else module.contrast(q).detach(),
                log_decay=None if decay is None else for_heads(decay, q).detach(),
                values=v,
                gathered=out,
            )
            self._add(found, layer)
            return out

        return listen

    def _listen_to_softmax_mixer(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def listen(x: Tensor, tokens: Any, cache: Any) -> Tensor:
            seen = len(self.records)
            out = forward(x, tokens, cache)
            for found in self.records[seen:]:
                # its mask lets padding see itself, so the bias does not mark padding
                found.key_mask = tokens.key_mask
            return out

        return listen

    def _listen_to_hybrid(self, layer: AttentionLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
        module: Any = layer.module

        def listen(
            q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, key_mask: Any = None, scale: Any = None, state: Any = None
        ) -> Any:
            reject_earlier_tokens(layer, 0 if state is None else max(state.lengths))
            out, after = forward(q, k, v, x, key_mask=key_mask, scale=scale, state=state)
            scores = module.scores(q, k, x, scale=scale, state=state)
            found = HybridRecord(
                name=layer.name,
                method=layer.method,
                q=q.detach(),
                k=for_heads(k, q).detach(),
                feature_map=module.map,
                settings=module.settings,
                gate=module.gates(x),
                scores=None if scores is None else scores.repeat_interleave(q.shape[2] // scores.shape[2], dim=2).detach(),
                key_mask=key_mask,
                scale=scale,
                values=v,
                gathered=out,
            )
            self._add(found, layer)
            return out, after

        return listen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function is F.scaled_dot_product_attention and self._running and self._running[-1].kind == "softmax":
            self._add_softmax(self._running[-1], out, *args, **kwargs)
        return out

    def _add_softmax(
        self,
        layer: AttentionLayer,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        q, k = query.transpose(1, 2), key.transpose(1, 2)
        found = SoftmaxRecord(
            name=layer.name,
            method=layer.method,
            q=q.detach(),
            k=for_heads(k, q).detach(),
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            bias=None if attn_mask is None else attn_mask.detach(),
            causal=is_causal,
            values=value,
            gathered=out,
            heads_first=True,
        )
        self._add(found, layer)

    def _add(self, found: LayerRecord, layer: AttentionLayer, grid: Grid | None = None, key_grid: Grid | None = None) -> None:
        self._place(found, layer, grid, key_grid)
        times = sum(known.name.partition("#")[0] == found.name for known in self.records)
        if times:
            found.name = f"{found.name}#{times + 1}"
        if not self.keep_values:
            found.values = found.gathered = None
        self.records.append(found)

    def _place(self, found: LayerRecord, layer: AttentionLayer, grid: Grid | None, key_grid: Grid | None) -> None:
        """Set the grids of the tokens and keys in the image."""
        found.prefix = 0
        if layer.name in self._windows:
            found.windows, found.grid = self._windows[layer.name]
            found.key_grid = found.grid
            return
        tokens = found.num_tokens
        if grid is not None and (grid[0] > 1 or tokens == 1):
            found.grid, found.key_grid = grid, key_grid
        elif self.image is not None:
            known = getattr(self.model, "num_prefix_tokens", None)
            for prefix in (known,) if isinstance(known, int) else range(6):
                if (fitting := fit_grid(tokens - prefix, self.image)) is not None:
                    found.grid = found.key_grid = fitting
                    found.prefix = prefix
                    break


def fit_grid(tokens: int, image: Grid) -> Grid | None:
    """Return rows and columns of so many tokens with the proportions of the image; None if none fit."""
    if tokens < 1:
        return None
    height = math.isqrt(round(tokens * image[0] / image[1]))
    for rows in (height, height + 1):
        if rows and tokens % rows == 0 and abs(rows * image[1] - tokens // rows * image[0]) < max(image):
            return rows, tokens // rows
    return None


def _image_size(inputs: Inputs) -> Grid | None:
    """Return height and width if the inputs are images."""
    if isinstance(inputs, Mapping):
        inputs = inputs.get("pixel_values", next(iter(inputs.values()), torch.empty(0)))
    elif not isinstance(inputs, Tensor):
        inputs = inputs[0]
    return (inputs.shape[2], inputs.shape[3]) if isinstance(inputs, Tensor) and inputs.dim() == 4 else None


def packed_sequences(sequence: Tensor | None) -> Groups | None:
    """Return packed sequences as groups of tokens: sequence [B, N], numbers that rise along a row; None: each row is one."""
    if sequence is None:
        return None
    # number them from 0 in each row, so that there are only as many groups as the fullest row has
    of_tokens = sequence - sequence[:, :1]
    return Groups(of_tokens, range(int(of_tokens.max()) + 1))


def for_heads(k: Tensor, q: Tensor) -> Tensor:
    """Repeat keys [B, M, K, D], or values per key [B, M, K], for the heads of q that share them."""
    return k if k.shape[2] == q.shape[2] else k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
