"""Every setting of hybrid attention has the effect that its documentation says."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from helpers.attention_formula import EXACT, distance, formula
from helpers.option_effects import Effects
from nalaformer import feature_map
from nalaformer.attention.hybrid import HybridAttention, HybridSettings, hybrid_attention, recurrent_hybrid_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = Effects(field.name for field in fields(HybridSettings))
HEADS, KEY_HEADS, SIZE = 4, 2, 6
# some chunks have left the window, and the last one is not full
TOKENS = 23


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, TOKENS, HEADS, SIZE, dtype=torch.float64)
    k, v = torch.randn(2, 1, TOKENS, KEY_HEADS, SIZE, dtype=torch.float64)
    # the first token is no rule's favourite, only kept because it is the first
    k[:, 0] *= 0.1
    return q, 2 * k, v


def make_map(settings: HybridSettings):
    phi = feature_map(settings.feature_map, num_heads=HEADS, head_dim=SIZE, **settings.map_options).double()
    with torch.no_grad():
        for parameter in phi.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return phi


def key_norms(q: Tensor, k: Tensor) -> Tensor:
    """[N, H]."""
    return k[0].norm(dim=-1).repeat_interleave(HEADS // KEY_HEADS, 1)


def salient_tokens(scores: Tensor, settings: HybridSettings, chunk: int) -> set[int]:
    """What a head keeps for the queries of a chunk, from its scores [N]: the best of each chunk that has left the window."""
    kept: list[int] = []
    # scores are compared after rounding, and of equals the older wins
    order = scores.bfloat16().tolist()
    if settings.keep_first:
        order[0] = float("inf")
    for old in range(chunk - 1):
        members = range(old * settings.chunk_size, (old + 1) * settings.chunk_size)
        kept += sorted(members, key=lambda j: -order[j])[: settings.salient_per_chunk]
        if settings.max_salient:
            kept = sorted(kept, key=lambda j: -order[j])[: settings.max_salient]
    return set(kept)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, settings: HybridSettings, phi, scores: Tensor, gate: Tensor | None = None
) -> Tensor:
    """One query and head after the other: softmax over window and salient tokens, linear weights over the others."""
    group = HEADS // KEY_HEADS
    q, k, v = q[0], k[0].repeat_interleave(group, 1), v[0].repeat_interleave(group, 1)
    phi_q, phi_k = phi.query(q[None])[0], phi.key(k[None])[0]
    out = torch.zeros(TOKENS, HEADS, SIZE, dtype=torch.float64)
    for i in range(TOKENS):
        chunk = i // settings.chunk_size
        near = set(range(max(0, chunk - 1) * settings.chunk_size, i + 1))
        for h in range(HEADS):
            exact = sorted(near | salient_tokens(scores[:, h], settings, chunk))
            rest = [j for j in range(i) if j not in exact] if settings.linear else []
            weights = (k[exact, h] @ q[i, h] / SIZE**0.5).exp()
            linear = phi_k[rest, h] @ phi_q[i, h]
            if settings.linear_mass is not None:
                # a mean of the linear weights with the weight of at most so many tokens
                linear = linear * min(1, settings.linear_mass / max(1, len(rest)))
            if settings.merge == "released":
                # the exact ones relative to the largest, the linear ones as they are
                weights = weights / weights.max()
            values = linear @ v[rest, h] if rest else torch.zeros(SIZE, dtype=torch.float64)
            values = values if gate is None else values * gate[i, h]
            out[i, h] = (weights @ v[exact, h] + values) / (weights.sum() + linear.sum())
    return out[None]


def test_every_setting_of_hybrid_attention_is_seen_to():
    assert SETTINGS.missing() == []


@SETTINGS.of(
    *("chunk_size", "salient_per_chunk", "max_salient", "keep_first", "merge", "linear_mass", "feature_map", "map_options"),
    "linear",
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chunk_size": 3, "salient_per_chunk": 1},
        {"salient_per_chunk": 0},
        {"salient_per_chunk": 4},
        {"max_salient": 3},
        {"keep_first": False},
        {"merge": "released"},
        {"linear_mass": 3},
        {"linear_mass": None},
        {"feature_map": "elu"},
        {"feature_map": "focused", "map_options": {"power": 2.0}},
        {"linear": False},
        {"selection": "small_key_norm"},
        {"selection": "recent", "max_salient": 3},
    ],
    ids=str,
)
@torch.no_grad()
def test_outputs_are_those_of_the_settings(changes):
    settings = HybridSettings(**({"chunk_size": 4, "salient_per_chunk": 2} | changes))
    q, k, v = inputs()
    scores = {
        "key_norm": key_norms(q, k),
        "small_key_norm": -key_norms(q, k),
        "recent": torch.arange(TOKENS)[:, None].expand(-1, HEADS),
    }[settings.selection]
    phi = make_map(settings)
    out = hybrid_attention(q, k, v, feature_map=phi, settings=settings)
    # eps is a millionth of the largest weight
    assert distance(out, by_hand(q, k, v, settings, phi, scores)) < 3e-6


def log_odds(q: Tensor, k: Tensor, chunk_size: int) -> Tensor:
    """[N, H]: the paper's saliency but for a rising function: the logit of a token itself against those just before it."""
    scores = torch.zeros(TOKENS, HEADS, dtype=torch.float64)
    for t in range(TOKENS):
        for h in range(HEADS):
            logits = k[0, max(0, t - chunk_size + 1) : t + 1, h // 2] @ q[0, t, h] / SIZE**0.5
            scores[t, h] = logits[-1] - logits[:-1].logsumexp(-1)
    return scores


@SETTINGS.of("select_per", "selection")
@pytest.mark.parametrize("select_per", ["query_head", "key_head"])
@torch.no_grad()
def test_heads_that_share_keys_choose_by_themselves_or_together(select_per):
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1, selection="self_saliency", select_per=select_per)
    q, k, v = inputs()
    scores = log_odds(q, k, 4)
    if select_per == "key_head":
        scores = scores.unflatten(1, (KEY_HEADS, -1)).amax(-1).repeat_interleave(2, 1)
    phi = make_map(settings)
    out, state = recurrent_hybrid_attention(q, k, v, feature_map=phi, settings=settings)
    assert state.salient_keys.shape[1] == (HEADS if select_per == "query_head" else KEY_HEADS)
    assert distance(out, by_hand(q, k, v, settings, phi, scores)) < 3e-6


@SETTINGS.of("exact")
@pytest.mark.parametrize("name", ["elu", "hedgehog"])
@torch.no_grad()
def test_without_the_exact_branch_attention_is_linear(name):
    settings = HybridSettings(exact=False, feature_map=name)
    q, k, v = inputs()
    phi = make_map(settings)
    out = hybrid_attention(q, k, v, feature_map=phi, settings=settings)
    assert distance(out, formula(phi, q, k, v, causal=True)) < EXACT


@SETTINGS.of("gate", "feature_map", "map_options")
@pytest.mark.parametrize("gate", ["channel", "head", "none"])
@torch.no_grad()
def test_the_gate_shrinks_what_comes_from_afar(gate):
    options = {"feature_map": "focused", "map_options": {"power": 2.0}}
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1, gate=gate, **options)
    layer = HybridAttention(settings, dim=8, num_heads=HEADS, num_key_heads=KEY_HEADS, head_dim=SIZE).double()
    q, k, v = inputs()
    x, factor = torch.randn(1, TOKENS, 8, dtype=torch.float64), None
    if gate != "none":
        assert not layer.gate.weight.any()
        layer.gate.weight.normal_()
        layer.gate.bias.normal_()
        factor = (x @ layer.gate.weight.T + layer.gate.bias).sigmoid()[0].unflatten(-1, (HEADS, -1))
        assert factor.shape[-1] == (SIZE if gate == "channel" else 1)
    phi = make_map(settings)
    layer.map.load_state_dict(phi.state_dict())
    out, _ = layer(q, k, v, x)
    assert distance(out, by_hand(q, k, v, settings, phi, key_norms(q, k), factor)) < 3e-6


@SETTINGS.of("selection")
@torch.no_grad()
def test_a_learned_choice_follows_its_scorer():
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1, selection="learned", gate="none")
    layer = HybridAttention(settings, dim=8, num_heads=HEADS, num_key_heads=KEY_HEADS, head_dim=SIZE).double()
    q, k, v = inputs()
    x = torch.randn(1, TOKENS, 8, dtype=torch.float64)
    out, _ = layer(q, k, v, x)
    scores = layer.scorer(x)[0].float().repeat_interleave(2, 1)
    assert distance(out, by_hand(q, k, v, settings, layer.map, scores)) < 3e-6


@torch.no_grad()
def test_the_scale_is_that_of_the_exact_scores():
    settings = HybridSettings(chunk_size=4, salient_per_chunk=1)
    q, k, v = inputs()
    phi = make_map(settings)
    near = slice(0, 4)
    out = hybrid_attention(q, k, v, feature_map=phi, settings=settings, scale=1.5)
    heads_k, heads_v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q[:, near], heads_k[:, near]) * 1.5
    weights = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1)
    assert distance(out[:, near], torch.einsum("bhij,bjhd->bihd", weights, heads_v[:, near])) < 3e-6
