"""Compiles the kernels of some calls for an H200, which need not be there; run by test_kernel_launches.py, not interpreted.

For a change that must leave the kernels alone, `TRITON_DISABLE_LINE_INFO=1 python tests/compile_kernels.py causal FOLDER` saves
their PTX before it and after it, and `diff -r` compares the folders.

The interpreter runs kernels as Python, which forgives what the compiler does not, as a name that changes its type in a loop.
Here a launch compiles its kernel and runs nothing, so the outputs mean nothing. The machine code is searched for a known fault.
"""

import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import nalaformer
import nalaformer.ops.kernels
import nalaformer.ops.kernels.linear.global_query_op
from nalaformer import Rotary, ops
from nalaformer.ops import backend
from nalaformer.ops.kernels.common import launch
from nalaformer.ops.kernels.common.machine_code import is_miscompiled
from nalaformer.ops.kernels.delta import delta_op, unit_features_op  # noqa: F401
from nalaformer.ops.kernels.linear import call
from nalaformer.ops.kernels.tokenwise import (  # noqa: F401
    depthwise_op,
    gated_linear_op,
    linear_cross_entropy_op,
    norm_op,
    residual_op,
    short_convolution_op,
)

H200 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
compiled = set()
saved = Path(sys.argv[2]) if len(sys.argv) > 2 else None


def compile_instead(launches, key, kernel, tensors, describe):
    _, numbers, constants = describe()
    names = kernel.arg_names
    types, values, hints = [TYPES[x.dtype] for x in tensors], {}, {}
    # what Triton makes of arguments at a launch: ones are constants, multiples of sixteen are known as such
    for place, number in enumerate(numbers, len(tensors)):
        types.append("fp32" if isinstance(number, float) else "constexpr" if number == 1 else "i32")
        if types[-1] == "constexpr":
            values[place,] = 1
        elif types[-1] == "i32" and number % 16 == 0:
            hints[place,] = [["tt.divisibility", 16]]
    hints |= {(place,): [["tt.divisibility", 16]] for place, x in enumerate(tensors) if x.data_ptr() % 16 == 0}
    values |= {(place,): constants[name] for place, name in enumerate(names) if place >= len(types)}
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(names[len(types) :], "constexpr")
    options = {name: constants[name] for name in launch.OPTIONS if name in constants}
    made = triton.compile(ASTSource(kernel, signature, constexprs=values, attrs=hints), target=H200, options=options)
    compiled.add(kernel.__name__)
    if saved is not None:
        saved.mkdir(parents=True, exist_ok=True)
        (saved / f"{kernel.__name__}-{len(list(saved.glob(f'{kernel.__name__}-*')))}.ptx").write_text(made.asm["ptx"])
    # a launch that asks for more shared memory than a program gets fails
    assert made.metadata.shared <= 227 * 1024, f"{kernel.__name__} with {options} takes {made.metadata.shared} bytes on chip"
    # a launch would fall back on slow code
    assert not is_miscompiled(made.asm["cubin"]), f"{kernel.__name__} with {options} and {constants}"


def attend(name, dtype, heads=2, kv_heads=2, tokens=80, keys=None, size=20, options=None, backward=True, **arguments):
    feature_map = nalaformer.feature_map(name, num_heads=heads, head_dim=size, **(options or {}))
    shapes = [(tokens, heads), *[(keys or tokens, kv_heads)] * 2]
    batch = () if "cu_seqlens" in arguments else (1,)
    q, k, v = (torch.zeros(*batch, *shape, size, dtype=dtype, requires_grad=backward) for shape in shapes)
    out = nalaformer.linear_attention(q, k, v, feature_map=feature_map, **arguments)
    if backward:
        out.sum().backward()


def bidirectional():
    bounds = torch.tensor([0, 15, 80])
    attend("norm_aware", torch.bfloat16)
    attend("norm_aware", torch.bfloat16, tokens=49, size=64, options={"learnable": True})
    call.WHOLE_TOKENS = 16
    attend("norm_aware", torch.bfloat16, heads=4, key_mask=torch.ones(1, 80, dtype=torch.bool))
    packed = {"cu_seqlens": bounds, "rotary": Rotary.packed(bounds, 20)}
    attend("norm_aware", torch.bfloat16, options={"direction": "cosine", "learnable": True}, **packed)
    attend("polarity", torch.float32)
    attend("polarity", torch.bfloat16, size=128, rotary=Rotary.sequence(80, 128))
    attend("focused", torch.float16, options={"norm_over": "head"})
    # contrast and weights of keys, in several launches and in one
    extended = {"contrast": "mean_score", "key_weight": torch.ones(1, 80, 2)}
    attend("elu", torch.bfloat16, size=64, rotary=Rotary.sequence(80, 64), **extended)
    call.WHOLE_TOKENS = 256
    attend("elu", torch.bfloat16, size=64, backward=False, **extended)
    # weights by the mean query, made by the kernels
    visible = torch.ones(1, 80, dtype=torch.bool)
    attend("elu", torch.bfloat16, size=64, key_weight="global_query", rotary=Rotary.sequence(80, 64))
    attend("split", torch.bfloat16, size=64, key_weight="global_query", key_mask=visible, query_mask=visible)
    q, k = (torch.zeros(1, 80, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    split = nalaformer.feature_map("split", num_heads=2, head_dim=64)
    nalaformer.global_query_weight(q, k, feature_map=split).sum().backward()


def causal():
    bounds = torch.tensor([0, 15, 80])
    visible = torch.ones(1, 80, dtype=torch.bool)
    # one short walk, which has its own backward pass
    attend("norm_aware", torch.bfloat16, size=64, causal=True)
    attend("norm_aware", torch.bfloat16, causal=True, key_mask=visible, rotary=Rotary.sequence(80, 20))
    attend("norm_aware", torch.float32, size=64, causal=True, options={"learnable": True})
    attend("focused", torch.bfloat16, size=40, causal=True, options={"norm_over": "head"})
    # one stretch, then as many as tiles
    call.WHOLE_TOKENS = 16
    attend("norm_aware", torch.bfloat16, size=64, causal=True)
    call.SPREAD = dict.fromkeys(call.SPREAD, (64, 1))
    attend("norm_aware", torch.bfloat16, size=64, causal=True)
    attend("norm_aware", torch.bfloat16, size=64, heads=4, causal=True, key_mask=visible)
    # rows at no multiple of sixteen numbers are not read ahead, which makes other code of the same tiles
    attend("norm_aware", torch.bfloat16, size=40, causal=True, backward=False)
    attend("norm_aware", torch.bfloat16, heads=4, causal=True, cu_seqlens=bounds, rotary=Rotary.packed(bounds, 20))
    attend("norm_aware", torch.bfloat16, size=128, causal=True, key_mask=visible, rotary=Rotary.sequence(80, 128))
    attend("norm_aware", torch.float32, causal=True, options={"direction": "cosine", "learnable": True})
    attend("focused", torch.bfloat16, causal=True, options={"norm_over": "head"}, rotary=Rotary.sequence(80, 20))
    # keys that fade, in several stretches
    call.DECAY_SPLIT = 32
    decay = torch.zeros(1, 80, 2, requires_grad=True)
    attend("norm_aware", torch.bfloat16, size=64, causal=True, log_decay=decay)
    attend("channel_softmax", torch.bfloat16, size=64, heads=4, causal=True, key_mask=visible, log_decay=decay)
    attend("relu", torch.bfloat16, causal=True, rotary=Rotary.sequence(80, 20), log_decay=decay)
    attend("norm_aware", torch.float32, size=64, causal=True, options={"learnable": True}, log_decay=decay)
    attend("channel_softmax", torch.bfloat16, size=128, causal=True, key_mask=visible, log_decay=decay)
    packed_decay = torch.zeros(80, 2, requires_grad=True)
    attend("norm_aware", torch.bfloat16, size=64, causal=True, cu_seqlens=bounds, log_decay=packed_decay)


def large_heads():
    """Heads of 65 to 128 channels, whose tiles fill the chip, with masked keys and other numbers of keys than queries."""
    visible = torch.ones(1, 100, dtype=torch.bool)
    options = {"focused": {"norm_over": "head"}, "reflection": {"cross_head": False}}
    for name in ("norm_aware", "relu", "split", "channel_softmax", "polarity", "polarity_exp", *options):
        attend(name, torch.bfloat16, tokens=65, keys=100, size=72, options=options.get(name), key_mask=visible)
    for size in (65, 80, 128):
        attend("norm_aware", torch.bfloat16, tokens=65, keys=100, size=size, key_mask=visible)
    attend("norm_aware", torch.bfloat16, tokens=65, keys=100, size=72)
    attend("norm_aware", torch.bfloat16, tokens=100, size=72, key_mask=visible, options={"learnable": True})
    extended = {"contrast": "mean_score", "key_weight": torch.ones(1, 100, 2)}
    attend("split", torch.bfloat16, tokens=100, size=72, key_mask=visible, **extended)
    turned = Rotary.sequence(100, 72)
    attend("norm_aware", torch.bfloat16, tokens=100, size=72, key_mask=visible, rotary=turned)
    # in several launches
    call.WHOLE_TOKENS = 16
    attend("norm_aware", torch.bfloat16, tokens=65, keys=100, size=72, key_mask=visible)
    attend("split", torch.bfloat16, tokens=100, size=72, key_mask=visible, **extended)
    by_mean = {"key_weight": "global_query", "query_mask": visible}
    attend("split", torch.bfloat16, tokens=100, size=72, key_mask=visible, **by_mean)


def language():
    """What surrounds attention in a language model."""
    x = torch.zeros(2, 80, 192, dtype=torch.bfloat16, requires_grad=True)
    weight, scale = torch.zeros(192, 4, dtype=torch.float32, requires_grad=True), x[0, 0].detach()
    sequence = torch.arange(160).view(2, 80) // 30
    # two kernels of each: with and without SiLU
    parts = ops.short_convolution(x, weight, weight[:, 0], sizes=(64, 64, 64), silu=1, sequence=sequence)
    sum(part.sum() for part in parts).backward()
    with torch.no_grad():
        ops.short_convolution(x, weight, sizes=(64, 64, 64), before=x[:, :3])
        ops.short_convolution_step_(x[:, :3].clone(), x[:, 3:4], weight, sizes=(64, 64, 64), silu=1)
    (ops.rms_norm(x, scale, eps=1e-6, gate=x) + sum(ops.add_rms_norm(x, x, scale, eps=1e-6))).sum().backward()
    ops.gated_linear(x, x, x[0]).sum().backward()
    norm_aware = nalaformer.feature_map("norm_aware", num_heads=3, head_dim=64)
    heads = x.unflatten(-1, (3, 64))
    features, beta = ops.unit_features(norm_aware, heads, heads), torch.zeros(2, 80, 3, requires_grad=True)
    ops.delta_rule(*features, heads, beta, log_decay=-beta)[0].sum().backward()
    ops.linear_cross_entropy(x[0], x[1], torch.zeros(80, dtype=torch.int64)).backward()


def backbone():
    """What surrounds attention in a block of a backbone, at sizes that come out even and at others."""
    for side, channels, dtype in ((14, 64, torch.bfloat16), (13, 70, torch.float16)):
        x = torch.zeros(4, side * side, channels, dtype=dtype, requires_grad=True)
        weight, bias = torch.zeros(channels, 1, 3, 3, requires_grad=True), torch.zeros(channels, requires_grad=True)
        wide = torch.zeros(channels, 1, 5, 5, requires_grad=True)
        grid = (side, side)
        hidden = ops.depthwise_conv(x, weight, bias, grid=grid, residual=True, gelu=True)
        mixed = ops.depthwise_conv(x, wide, None, grid=grid, plus=ops.depthwise_conv(x, weight, bias, grid=grid))
        normed = ops.layer_norm(mixed, bias, bias, eps=1e-6, gate=hidden)
        ops.scaled_residual(x, normed, scale=bias).sum().backward()


backend.why_no_triton_here = lambda: None
backend.why_not_on = lambda x: None
original = launch.start
for module in [module for name, module in sys.modules.items() if name.startswith("nalaformer.ops.kernels.")]:
    if getattr(module, "start", None) is original:
        module.start = compile_instead
with nalaformer.use_backend("triton"):
    calls = {"backbone": backbone, "bidirectional": bidirectional, "causal": causal, "large_heads": large_heads}
    (calls | {"language": language})[sys.argv[1]]()
print(*sorted(compiled))
