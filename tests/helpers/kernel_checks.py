"""What the tests of the kernels share: maps by name, outcomes with gradients, and how near to float64 they must be.

In Triton's interpreter on a CPU; with TRITON_INTERPRET=0 the same tests run compiled, on a GPU.
"""

import torch

import nalaformer
from helpers.products import FULL
from nalaformer.ops.backend import INTERPRETING

DEVICE = "cpu" if INTERPRETING else "cuda"
MAPS = {
    "relu": {},
    "elu": {},
    "split": {},
    "norm_aware": {},
    "norm_aware cosine": {"direction": "cosine"},
    "norm_aware learnable": {"learnable": True},
    "norm_aware mild": {"powers": "mild"},
    "polarity": {},
    "polarity_exp": {},
    "focused head": {"norm_over": "head"},
    "channel_softmax": {},
    "reflection pairs": {"cross_head": False},
    # a matrix product first, the rest in registers
    "hedgehog": {},
    # rows of all heads together: written out before attention unless there is one head
    "focused": {},
    "reflection": {},
    "reflection across": {"blockwise": False},
    # parameters of each sample: written out
    "reflection variance": {"variance": True},
    "reflection variance pairs": {"variance": True, "cross_head": False},
}
# keys without a bound need a scale per row, which the causal kernels lack; a token variance is not causal
CAUSAL_MAPS = [name for name in MAPS if not name.startswith("polarity") and "variance" not in name]
# one for each way that features take through the kernels, for what does not depend on the map: parameters of each head, a scale
# of each row and two streams, rows normalized, a product first, features written out, and parameters of each sample
KINDS = ["norm_aware learnable", "polarity", "focused head", "hedgehog", "reflection", "reflection variance"]
KINDS = list(MAPS) if FULL else KINDS
CAUSAL_KINDS = [name for name in KINDS if name in CAUSAL_MAPS]


def every_map_once(names, cases):
    """Return (name, case): every map in the first case, and each kind of map in the other cases."""
    return [(name, case) for name in names for case in cases if name in KINDS or case == cases[0]]


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-6)).item()


def outcome(backend, name, dtype, tensors, upstream, *, heads, head_dim, **arguments):
    """Output and all gradients, and the parameters that were used."""
    torch.manual_seed(0)
    feature_map = nalaformer.feature_map(name.split()[0], num_heads=heads, head_dim=head_dim, **MAPS[name])
    feature_map = feature_map.to(DEVICE, torch.float64 if dtype == torch.float64 else torch.float32)
    for parameter in feature_map.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape).to(parameter)
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    with nalaformer.use_backend(backend):
        out = nalaformer.linear_attention(*inputs, feature_map=feature_map, **arguments)
    wanted = [*inputs, *feature_map.parameters()]
    return [out, *torch.autograd.grad(out, wanted, upstream.to(out.dtype), allow_unused=True, materialize_grads=True)]


# compiled, logarithms and powers are the GPU's own, which miss by 2^-22 where rounding misses by 2^-24
BAR, OF_PLAIN = (2e-6, 2) if INTERPRETING else (4e-6, 4)


def check(name, tensors, *, heads, head_dim, bar=BAR, **arguments):
    """Within the bar of float64, or within some times what plain float32 misses it by: some sums over tokens cancel.

    The most that it misses, of inputs that differ by a rounding: a single number may be right by luck.
    """
    shape = (*tensors[0].shape[:-1], tensors[2].shape[-1])
    upstream = torch.randn(shape).to(DEVICE)

    def run(backend, dtype, inputs, upstream=upstream):
        return outcome(backend, name, dtype, inputs, upstream, heads=heads, head_dim=head_dim, **arguments)

    def usual_sizes():
        # drawn at once: every run sets the seed
        others = [run("reference", torch.float64, tensors, each) for each in torch.randn(8, *shape).to(DEVICE)]
        return [torch.stack([x.norm() for x in same]).square().mean().sqrt() for same in zip(*others, strict=True)]

    check_errors(run, tensors, bar, usual_sizes)


def check_errors(run, tensors, bar=BAR, usual_sizes=None):
    """Hold the kernels to the bar, or to what plain float32 misses; run(backend, dtype, inputs) gives what to compare.

    The bar is a part of what is compared, or of its usual size: the gradient of a parameter is one sum over all tokens and
    channels, which may be near zero by chance, while its terms are rounded as ever. usual_sizes(): of gradients of other sums.
    """
    exact = run("reference", torch.float64, tensors)
    ours = [relative_error(x, y) for x, y in zip(run("triton", torch.float32, tensors), exact, strict=True)]
    near, cancelled = [[0.0] for _ in ours], [1.0 for _ in ours]
    # under the bar with room to spare, what plain float32 misses decides nothing, and takes longer than the kernels
    if not all(error < bar / 3 for error in ours):
        alike = [[x * (1 + 2**-23 * torch.randn_like(x)) for x in tensors] for _ in range(2)]
        pairs = [(tensors, exact), *((inputs, run("reference", torch.float64, inputs)) for inputs in alike)]
        plain = [zip(run("reference", torch.float32, inputs), exactly, strict=True) for inputs, exactly in pairs]
        near = [[relative_error(x, y) for x, y in same] for same in zip(*plain, strict=True)]
        if usual_sizes is not None:
            cancelled = [max(1.0, (u / x.norm()).item()) for u, x in zip(usual_sizes(), exact, strict=True)]
    for error, misses, times in zip(ours, near, cancelled, strict=True):
        # room: the sums are conditioned alike, and the bar is some times what plain float32 misses on three such inputs
        assert error < bar * times + OF_PLAIN * max(misses)


HALF_ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def check_half_precision(name, dtype, tensors, upstream, **arguments):
    """Output and gradients of q, k, v: as near to float64 as the plain reference in the same type, and half an ulp.

    Gradients of parameters are sums over all tokens that may cancel to nothing, and are left to float32.
    """
    exact = outcome("reference", name, torch.float64, tensors, upstream, **arguments)
    plain = outcome("reference", name, dtype, tensors, upstream, **arguments)
    ours = outcome("triton", name, dtype, tensors, upstream, **arguments)
    for x, y, z in zip(ours[:4], exact[:4], plain[:4], strict=True):
        # room: half a unit is the most that the rounding of an operand costs, and none reaches it everywhere
        assert relative_error(x, y) < relative_error(z, y) + HALF_ULP[dtype]


def make(*shapes, scale=1.0):
    return [(torch.randn(shape) * scale).to(DEVICE) for shape in shapes]
