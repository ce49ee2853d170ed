"""Decoding in place on a GPU: the kernel in half precision, and whole steps as CUDA graphs. Run with TRITON_INTERPRET=0."""

import dataclasses

import pytest
import torch

import nalaformer
from nalaformer.attention.hybrid import HybridSettings, SteppingState, hybrid_step_, recurrent_hybrid_attention, roll_
from nalaformer.models.hybrid.decoder import SteppingDecoder
from test_linearize import converted

pytestmark = pytest.mark.gpu

SETTINGS = HybridSettings(chunk_size=16, salient_per_chunk=2, max_salient=40)
SHARED, OWN, MANY = (32, 8, 64), (4, 4, 128), (24, 2, 96)


def make(tokens, heads, key_heads, head_dim, dtype):
    q, k, v = (torch.randn(3, tokens, h, head_dim, device="cuda").to(dtype) for h in (heads, key_heads, key_heads))
    phi = nalaformer.feature_map("norm_preserving", num_heads=heads, head_dim=head_dim).cuda()
    return q, k, v, torch.rand(3, tokens, heads, head_dim, device="cuda"), phi


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [SHARED, OWN, MANY], ids=str)
@pytest.mark.parametrize("select_per", ["key_head", "query_head"])
@torch.no_grad()
def test_the_kernel_is_as_close_to_float64_as_its_inputs_allow(dtype, sizes, select_per):
    settings, start, tokens = dataclasses.replace(SETTINGS, select_per=select_per), 700, 740
    q, k, v, gate, phi = make(tokens, *sizes, dtype)
    given = {"feature_map": phi, "settings": settings}
    prompt = [x[:, :start] for x in (q, k, v)]
    _, state = recurrent_hybrid_attention(*prompt, **given, gate=gate[:, :start])
    stepping = SteppingState.from_state(state, **given)
    ours = []
    for place in range(start, tokens):
        one, is_full = slice(place, place + 1), stepping.advance()
        ours.append(hybrid_step_(q[:, one], k[:, one], v[:, one], state=stepping, gate=gate[:, one]))
        if is_full:
            roll_(stepping)
    wide = [x.double() for x in (q, k, v)]
    expected, _ = recurrent_hybrid_attention(*wide, feature_map=phi.double(), settings=settings, gate=gate.double())
    expected = expected[:, start:]
    error = (torch.cat(ours, 1).double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]


@pytest.mark.parametrize("rule", ["key_norm", "self_saliency", "received", "learned", "recent", "random"])
@pytest.mark.parametrize("max_salient", [0, 6])
@torch.no_grad()
def test_a_captured_step_gives_the_logits_of_the_eager_model(rule, max_salient):
    settings = HybridSettings(chunk_size=8, salient_per_chunk=2, selection=rule, max_salient=max_salient)
    model = converted(settings=settings).cuda()
    tokens = torch.randint(3, 50, (2, 60), device="cuda")
    cache = model(tokens[:, :20], use_cache=True).past_key_values
    decoder = SteppingDecoder(model, cache, capacity=None if max_salient else 20)
    assert decoder.is_captured
    for place in range(20, 60):
        expected = model(tokens[:, place : place + 1], past_key_values=cache).logits[:, 0]
        torch.testing.assert_close(decoder.step(tokens[:, place]), expected, rtol=0, atol=2e-4)


@torch.no_grad()
def test_capturing_leaves_the_state_as_it_was():
    model = converted(settings=SETTINGS).cuda()
    cache = model(torch.randint(3, 50, (2, 60), device="cuda"), use_cache=True).past_key_values
    before, after = (SteppingDecoder(model, cache, capture=capture).cache for capture in (False, True))
    for one, two in zip(before.states, after.states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one.tensors(), two.tensors(), strict=True))
