"""The attention layer: project, apply the feature map, attend, convolve, normalize, gate, project."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..feature_maps import Reflection, feature_map
from ..ops import (
    Rotary,
    check_key_mask,
    compute_dtype,
    global_query_weight,
    hide,
    linear_attention,
    received_attention,
)
from ..ops.exporting import is_jit_tracing
from ..ops.kept_tensors import kept
from ..ops.mixed_states import Blocks, blocks_of, mixed_linear_attention
from .block_mix import BlockMix
from .cells import Grid, cells_at, on_grid
from .config import AttentionConfig
from .fading import Fading
from .layer_norm import LayerNorm
from .learned_contrast import LearnedContrast
from .local_mix import LocalMix, resize_values
from .position_table import PositionTable
from .windows import Groups, RelativeBias, Windows, held_to_sizes

# layers of one stage share their rotary table, also across steps
cached_rotary = kept(Rotary.grid, maxsize=32)


class Attention(nn.Module):
    """Attention over tokens [B, N, C], with the parts that `config` names.

    grid: (height, width) of the image whose tokens x holds, row by row; without it they are a single row.
    """

    def __init__(self, config: AttentionConfig, *, dim: int, num_heads: int) -> None:
        super().__init__()
        if not isinstance(config, AttentionConfig):
            raise TypeError(
                f"config must be an AttentionConfig, got {config!r}; attention.build makes a layer by the name of its method"
            )
        if not isinstance(dim, int) or not isinstance(num_heads, int) or dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a positive multiple of num_heads, got dim {dim!r} and {num_heads!r} heads")
        head_dim = dim // num_heads
        self.config = config
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        if config.position == "rotary" and head_dim % 4:
            raise ValueError(
                f"2-D rotary needs head sizes in multiples of 4, got {head_dim} (dim {dim} / {num_heads} heads); "
                f'choose other heads or position="none"'
            )

        self.map = None
        if config.feature_map is not None:
            self.map = feature_map(config.feature_map, num_heads=num_heads, head_dim=head_dim, **config.map_options)
            if head_dim % self.map.streams:
                raise ValueError(
                    f"{config.feature_map} reads the values in {self.map.streams} equal parts and needs head sizes that "
                    f"divide so, got {head_dim} (dim {dim} / {num_heads} heads)"
                )
        self.contrast = None
        if config.contrast == "learned":
            self.contrast = LearnedContrast(num_heads=num_heads, offset=config.contrast_offset)
        self.block_mix = BlockMix(config.mixed_blocks) if config.num_states > 1 else None
        gates = 0 if config.gate == "none" else 1
        if config.key_reduction == 1:
            self.qkvg = nn.Linear(dim, (3 + gates) * dim, bias=config.qkv_bias)
        else:
            size = config.key_reduction
            self.qg = nn.Linear(dim, (1 + gates) * dim, bias=config.qkv_bias)
            self.kv = nn.Linear(dim, 2 * dim, bias=config.qkv_bias)
            self.reduce = nn.Conv2d(dim, dim, size, stride=size)
            self.reduce_norm = nn.LayerNorm(dim)
        self.table = None
        if config.position == "table":
            self.table = PositionTable(channels=dim, grid=config.table_grid)
        self.relative_bias = None
        if config.position == "relative":
            self.relative_bias = RelativeBias(num_heads=num_heads, size=config.window)
        self.local_mix = None
        if config.local_mix != "none":
            self.local_mix = LocalMix(
                num_heads=num_heads,
                head_dim=head_dim,
                kernel_size=config.kernel_size,
                shared=config.local_mix == "heads",
            )
        self.norm = LayerNorm(dim) if config.norm else None
        self.fading = Fading(dim=dim, num_heads=num_heads) if config.forgets else None
        self.projection = nn.Linear(dim, dim)

    def forward(
        self,
        x: Tensor,
        grid: Grid | None = None,
        key_mask: Tensor | None = None,
        groups: Tensor | None = None,
        num_groups: int | None = None,
    ) -> Tensor:
        """Attend: x [B, N, C] -> [B, N, C]. key_mask: [B, N] bool, True = a real token; padding reaches no other token.

        groups: [B, N] integers >= 0. A token sees only its own group, in attention and in the local mix, at the cost of one
        pass per group (the parts of a shifted window are such groups).
        num_groups: an upper bound on the groups, which saves a wait for the device. A group above it makes its token NaN in
        linear attention. A position table covers the whole grid, so padding changes the positions of the real tokens.
        """
        grid = self._checked_grid(x, grid)
        check_key_mask(key_mask, x)
        parts = self._checked_groups(groups, num_groups, x)
        q, k, v, gate, key_grid = self.project(x, grid, key_mask)
        if self.table is not None:
            k = k + self.table(key_grid).unflatten(-1, (self.num_heads, self.head_dim)).to(k.dtype)
        log_decay = None if self.fading is None else self.fading(x)
        out = self.attend(q, k, v, grid, key_grid, key_mask, parts, log_decay).flatten(2)
        if self.local_mix is not None:
            # the convolution must not mix padding into its neighbors either
            v = hide(v, key_mask)
            if self.config.key_reduction > 1:
                v = resize_values(v, key_grid, grid, self.config.value_upsampling)
            out = self._mix_nearby(v, grid, parts, out)
        return self._output(out, gate)

    def forward_at(self, x: Tensor, grid: Grid, places: Tensor) -> Tensor:
        """Attend among some tokens of a grid: x [B, n, C] lie in the cells `places` [B, n], the other cells are empty."""
        if self.config.window or self.config.key_reduction > 1 or self.config.causal or self.block_mix is not None:
            raise ValueError(
                "some tokens of a grid attend globally: use window=0, key_reduction=1, causal=False and mixed_blocks=(1, 1)"
            )
        q, k, v, gate, _ = self.project(x, (1, x.shape[1]), None)
        if self.table is not None:
            table = self.table(grid).unflatten(-1, (self.num_heads, self.head_dim)).to(k.dtype)
            k = k + cells_at(table.expand(len(x), *table.shape[1:]), places)
        rotary = None
        if self.config.position == "rotary":
            wide = self.map is not None and self.config.rotary_over == "features"
            whole = self._rotary(grid, self.head_dim * (2 if wide else 1), q)
            rotary = replace(whole, positions=whole.positions[places])
        if self.map is not None:
            out = self._linear(q, k, v, rotary, None)
        else:
            if rotary is not None:
                q, k = (rotary.rotate(y.to(compute_dtype(y))).to(y.dtype) for y in (q, k))
            q, k, heads = (y.transpose(1, 2) for y in (q, k, v))
            dropout = self.config.weight_dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, heads, dropout_p=dropout).transpose(1, 2)
        out = out.flatten(2)
        if self.local_mix is not None:
            out = out + cells_at(self.local_mix(on_grid(v, grid, places), grid), places)
        return self._output(out, gate)

    @torch.no_grad()
    def received_attention(self, x: Tensor, grid: Grid | None = None, *, prefix: int = 0) -> Tensor:
        """Return the attention that each token receives, [B, N], by `ops.received_attention`; x: [B, N, C]."""
        if self.config.window or self.config.key_reduction > 1 or self.config.causal or self.block_mix is not None:
            raise ValueError(
                "received attention needs tokens that all see each other alike: use window=0, key_reduction=1, causal=False "
                "and mixed_blocks=(1, 1)"
            )
        grid = self._checked_grid(x, grid)
        # project queries and keys alone; values and gate are not needed
        bias = None if self.qkvg.bias is None else self.qkvg.bias[: 2 * self.dim]
        both = F.linear(x, self.qkvg.weight[: 2 * self.dim], bias)
        q, k = both.unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        if self.table is not None:
            k = k + self.table(grid).unflatten(-1, (self.num_heads, self.head_dim)).to(k.dtype)
        return received_attention(q, k, feature_map=self.map, key_weight=self.key_weights(q, k, None), prefix=prefix)

    def _output(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """Apply norm, gate and the last projection: [B, N, C]."""
        norm = self.norm
        if norm is not None and self.config.gate == "silu":
            return self.projection(norm(out, gate))
        if norm is not None:
            out = norm(out)
        if gate is not None:
            out = out * (F.silu(gate) if self.config.gate == "silu" else gate)
        return self.projection(out)

    def project(self, x: Tensor, grid: Grid, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Grid]:
        """Return views q, k, v [B, N, H, D] of one projection, the gate [B, N, C], and the grid of the keys."""

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.num_heads, self.head_dim))

        size = self.config.key_reduction
        if size == 1:
            # one view and one split, since each costs the host as much as a small kernel
            q, k, v, *gate = self.qkvg(x).unflatten(-1, (-1, self.num_heads, self.head_dim)).unbind(2)
            return q, k, v, gate[0].flatten(2) if gate else None, grid
        if key_mask is not None:
            raise ValueError(
                f"key_mask needs a key for each token, got key_reduction={size}, which mixes tokens before they become "
                "keys; use key_reduction=1 or pad the image instead"
            )
        q, *gate = self.qg(x).split(self.dim, dim=-1)
        # pad a grid that does not divide, so that no pixel is lost
        image = x.unflatten(1, grid).permute(0, 3, 1, 2)
        image = self.reduce(F.pad(image, (0, -grid[1] % size, 0, -grid[0] % size)))
        key_grid = (image.shape[2], image.shape[3])
        k, v = self.kv(self.reduce_norm(image.flatten(2).transpose(1, 2))).split(self.dim, dim=-1)
        return heads(q), heads(k), heads(v), gate[0] if gate else None, key_grid

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        key_grid: Grid,
        key_mask: Tensor | None,
        groups: Groups | None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        """Return the attention outputs [B, N, H, D]; `nalaformer.analysis` records this call."""
        if not self.config.window:
            return self._attend_globally(q, k, v, grid, key_grid, key_mask, groups, log_decay)
        if is_jit_tracing():
            grid, v = held_to_sizes(grid, v)
        windows = Windows(grid, size=self.config.window, shifted=self.config.shifted)
        groups, key_mask = windows.groups(q), windows.visible(key_mask, q)
        q, k, v = (windows.split(y) for y in (q, k, v))
        return windows.join(self._attend_globally(q, k, v, windows.shape, windows.shape, key_mask, groups))

    def _attend_globally(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid: Grid,
        key_grid: Grid,
        key_mask: Tensor | None,
        groups: Groups | None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        if self.map is None:
            return self._softmax(q, k, v, grid, key_grid, key_mask, groups)
        rotary: Rotary | tuple[Rotary, Rotary] | None = None
        if self.config.position == "rotary":
            channels = self.head_dim * (2 if self.config.rotary_over == "features" else 1)
            rotary = self._rotary(grid, channels, q)
            if key_grid != grid:
                rotary = (rotary, self._rotary(key_grid, channels, k))
        blocks = None if self.block_mix is None else self.blocks(grid, key_grid, q)
        if groups is None:
            return self._linear(q, k, v, rotary, key_mask, blocks, log_decay)
        # the state sums over keys and cannot separate queries, so each group takes one pass

        def attend(inside: Tensor) -> Tensor:
            return self._linear(q, k, v, rotary, inside if key_mask is None else inside & key_mask, blocks, log_decay)

        return groups.join(attend, q)

    def blocks(self, grid: Grid, key_grid: Grid, like: Tensor) -> tuple[Blocks, Blocks]:
        """Return the blocks of the queries and of the keys."""
        of_queries, of_keys = (blocks_of(*side, *self.config.mixed_blocks, device=like.device) for side in (grid, key_grid))
        return of_queries, of_keys

    @torch.no_grad()
    def pair_mixing(self, grid: Grid, key_grid: Grid, like: Tensor) -> Tensor | None:
        """Return the mixing weight of each query and key, [N, M]; None: all alike."""
        if self.block_mix is None:
            return None
        of_queries, of_keys = self.blocks(grid, key_grid, like)
        return self.block_mix()[of_queries.of_tokens][:, of_keys.of_tokens]

    def _linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | tuple[Rotary, Rotary] | None,
        visible: Tensor | None,
        blocks: tuple[Blocks, Blocks] | None = None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        """Compute linear attention with the layer's contrast and key weights; masked tokens are neither keys nor queries."""
        mapped = self.map
        assert mapped is not None
        if self.block_mix is not None and blocks is not None:
            rotaries = rotary if isinstance(rotary, tuple) else (rotary, rotary)
            given = {"feature_map": mapped, "mixing": self.block_mix(), "blocks": blocks, "rotary": rotaries}
            return mixed_linear_attention(q, k, v, key_mask=visible, query_mask=visible, **given)
        return linear_attention(
            *(q, k, v),
            feature_map=mapped,
            causal=self.config.causal,
            block=self.config.block,
            rotary=rotary,
            key_mask=visible,
            query_mask=visible,
            contrast=self.op_contrast(q),
            key_weight=None if self.config.key_weight == "none" else self.config.key_weight,
            log_decay=log_decay,
        )

    def key_weights(self, q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor | None:
        """Return the weight of each key beside its features, [B, N, H]; None: all alike."""
        if self.map is None or self.config.key_weight == "none":
            return None
        return global_query_weight(q, k, feature_map=self.map, key_mask=visible, query_mask=visible)

    def op_contrast(self, q: Tensor) -> Tensor | str | None:
        """Return the contrast in the form that linear_attention takes."""
        if self.contrast is not None:
            return self.contrast(q)
        return None if self.config.contrast == "none" else self.config.contrast

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_grid: Grid, key_mask: Tensor | None, groups: Groups | None
    ) -> Tensor:
        if self.config.position == "rotary":
            q = self._rotary(grid, self.head_dim, q).rotate(q.to(compute_dtype(q))).to(q.dtype)
            k = self._rotary(key_grid, self.head_dim, k).rotate(k.to(compute_dtype(k))).to(k.dtype)
        mask = None
        if key_mask is not None:
            # NaN in a masked token would reach others as 0 * NaN
            k, v = hide(k, key_mask), hide(v, key_mask)
            mask = key_mask[:, None, None, :]
        if groups is not None:
            together = (groups.of_tokens[:, :, None] == groups.of_tokens[:, None, :])[:, None]
            mask = together if mask is None else mask & together
        if self.config.causal and (mask is not None or self.config.block > 1):
            earlier = self._not_later(q.shape[1], q.device)
            mask = earlier if mask is None else mask & earlier
        causal = self.config.causal and mask is None
        if self.relative_bias is not None:
            bias = self.relative_bias(grid).to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        dropout = self.config.weight_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout)
        return out.transpose(1, 2)

    def _not_later(self, tokens: int, device: torch.device) -> Tensor:
        """Return an [N, N] bool mask that is True if the block of key j is that of query i or an earlier one."""
        number = torch.arange(tokens, device=device) // self.config.block
        return number <= number[:, None]

    def _mix_nearby(self, v: Tensor, grid: Grid, groups: Groups | None, out: Tensor) -> Tensor:
        mix = self.local_mix
        assert mix is not None
        if groups is None:
            return mix(v, grid, out)
        return out + groups.join(lambda inside: mix(hide(v, inside), grid), out)

    def _rotary(self, grid: Grid, channels: int, like: Tensor) -> Rotary:
        # softmax weights sum to one without normalization, so rotation is all that is needed
        normalised = self.config.normalised_rotary and self.map is not None
        return cached_rotary(*grid, channels, normalised=normalised, device=like.device)

    def _checked_grid(self, x: Tensor, grid: Grid | None) -> Grid:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch tensor, got {type(x).__name__}; convert it with torch.as_tensor()")
        if not x.is_floating_point():
            raise ValueError(f"x must hold floats, got {x.dtype}; convert it with .float()")
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(
                f"x must be tokens [batch, tokens, {self.dim}], got shape {tuple(x.shape)}; "
                "flatten an image with x.flatten(2).transpose(1, 2)"
            )
        if x.shape[1] == 0:
            raise ValueError(f"x must hold at least one token, got shape {tuple(x.shape)}")
        if grid is None:
            return 1, x.shape[1]
        # accept lists too; sides are no ints while a program is exported
        is_pair = isinstance(grid, tuple | list) and len(grid) == 2 and not any(isinstance(side, float | str) for side in grid)
        if not is_pair or grid[0] < 1 or grid[1] < 1:
            raise ValueError(f"grid must be (height, width), two positive whole numbers, got {grid!r}")
        height, width = grid
        if height * width != x.shape[1]:
            raise ValueError(f"grid must cover the tokens: {height} x {width} = {height * width}, got {x.shape[1]} tokens")
        return height, width

    def _checked_groups(self, groups: Tensor | None, num_groups: int | None, x: Tensor) -> Groups | None:
        if groups is None:
            return None
        if not isinstance(groups, Tensor):
            raise TypeError(f"groups must be a torch tensor, got {type(groups).__name__}; convert it with torch.as_tensor()")
        if groups.shape != x.shape[:2] or groups.is_floating_point():
            raise ValueError(
                f"groups must be integers for each token, {tuple(x.shape[:2])}, got {tuple(groups.shape)} {groups.dtype}"
            )
        if self.config.window or self.config.key_reduction > 1:
            raise ValueError("groups need a key for each token of the grid; use window=0 and key_reduction=1")
        if num_groups is not None:
            if num_groups < 1:
                raise ValueError(f"num_groups must be at least 1, got {num_groups}; omit it to count the groups")
            return Groups(groups, range(num_groups))
        numbers = groups.unique().tolist()
        if numbers and numbers[0] < 0:
            raise ValueError(
                f"groups must be integers of at least 0, got {numbers[0]}; hide tokens of no group with key_mask, or give them "
                "a group of their own"
            )
        return Groups(groups, numbers)

    @property
    def is_foldable(self) -> bool:
        """True if `fold` keeps the outputs."""
        mapped = self.map
        if not isinstance(mapped, Reflection) or mapped.variance:
            return False
        return self.contrast is None or not mapped.cross_head

    @torch.no_grad()
    def fold(self) -> "Attention":
        """Fold a static reflection into the projection, in place: same outputs with plain ReLU features. For inference."""
        if not isinstance(self.map, Reflection):
            raise ValueError(f"only a reflection folds into the projection, got {self.config.feature_map} features")
        if not self.is_foldable and not self.map.variance:
            raise ValueError(
                'contrast="learned" takes the norms of the queries before they are reflected across heads, which changes them, '
                "got a layer with both; build it with cross_head=False or another contrast"
            )
        parts = [(self.qkvg, 0), (self.qkvg, 1)] if self.config.key_reduction == 1 else [(self.qg, 0), (self.kv, 0)]
        for linear, index in parts:
            rows = slice(index * self.dim, (index + 1) * self.dim)
            weight, bias = self.map.fold(linear.weight[rows], None if linear.bias is None else linear.bias[rows])
            linear.weight[rows] = weight
            if bias is not None:
                linear.bias[rows] = bias
        if self.table is not None:
            # added to the keys after the projection; a reflection of channels commutes with interpolation over cells
            self.table.table[0] = self.map.fold(self.table.table[0].T)[0].T
        self.map = feature_map("relu", num_heads=self.num_heads, head_dim=self.head_dim)
        return self
