"""Steps of hybrid attention in place, beside the recurrent function."""

import torch

import nalaformer
from nalaformer.attention.hybrid import SteppingState, empty_state, hybrid_step_, recurrent_hybrid_attention, roll_


def at(tensors, places):
    return [None if x is None else x[:, places] for x in tensors]


def walk(tensors, start, *, settings, feature_map, capacity=None, mask=None, gate=None, scores=None, backend="auto"):
    """Outputs after `start` tokens, by both ways; the states of both after the last one. backend: of the steps."""
    tokens = tensors[0].shape[1]
    q, k, v = tensors
    given = {"feature_map": feature_map, "settings": settings}
    state = empty_state(q, k, v, **given)
    if start:
        before = slice(0, start)
        prompt = {"gate": gate, "scores": scores, "key_mask": mask}
        prompt = {name: None if x is None else x[:, before] for name, x in prompt.items()}
        _, state = recurrent_hybrid_attention(*at(tensors, before), **given, **prompt)
    stepping = SteppingState.from_state(state, **given, capacity=capacity)
    ours, expected = [], []
    for place in range(start, tokens):
        one = slice(place, place + 1)
        beside = dict(zip(("gate", "scores"), at((gate, scores), one), strict=True))
        out, state = recurrent_hybrid_attention(*at(tensors, one), **given, **beside, state=state)
        expected.append(out)
        is_full = stepping.advance()
        with nalaformer.use_backend(backend):
            ours.append(hybrid_step_(*at(tensors, one), state=stepping, **beside))
        if is_full:
            roll_(stepping)
    return torch.cat(ours, 1), torch.cat(expected, 1), stepping, state


def assert_same_state(stepping, state, *, atol):
    found = stepping.to_state()
    assert found.lengths == state.lengths
    for name in ("keys", "values", "scores", "is_poisoned"):
        torch.testing.assert_close(getattr(found, name), getattr(state, name), rtol=0, atol=atol)
    # the choice first; the order in the store means nothing
    assert torch.equal(found.salient_scores.sort().values, state.salient_scores.sort().values)
    torch.testing.assert_close(found.salient_keys.sum(2), state.salient_keys.sum(2), rtol=0, atol=atol)
    # without a linear branch its counter stands still
    for name, tensor in state.linear.tensors().items() if stepping.settings.linear else ():
        torch.testing.assert_close(found.linear.tensors()[name], tensor, rtol=0, atol=atol)
