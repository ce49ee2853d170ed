"""Steps of hybrid attention in place, beside the recurrent function."""

import torch

import nalaformer
from nalaformer.attention.hybrid import empty_state, hybrid_step_, recurrent_hybrid_attention, roll_, stepping_state


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
    stepping = stepping_state(state, settings=settings, capacity=capacity)
    matrix = feature_map.query_matrix().detach() if hasattr(feature_map, "query_matrix") else None
    ours, expected = [], []
    for place in range(start, tokens):
        one = slice(place, place + 1)
        beside = dict(zip(("gate", "scores"), at((gate, scores), one), strict=True))
        out, state = recurrent_hybrid_attention(*at(tensors, one), **given, **beside, state=state)
        expected.append(out)
        with nalaformer.use_backend(backend):
            ours.append(hybrid_step_(*at(tensors, one), state=stepping, **given, **beside, query_matrix=matrix))
        if stepping.advance():
            roll_(stepping, **given)
    return torch.cat(ours, 1), torch.cat(expected, 1), stepping, state


def assert_same_state(found, state, *, atol):
    assert found.lengths == state.lengths == tuple(found.linear.count.tolist())
    for name in ("window_keys", "window_values", "scores", "is_poisoned"):
        torch.testing.assert_close(getattr(found, name), getattr(state, name), rtol=0, atol=atol)
    # the choice first; of equals either may come first in the store, and what comes after its tokens means nothing
    held = state.capacity
    assert torch.equal(found.salient_scores[..., :held], state.salient_scores)
    assert (found.salient_scores[..., held:] == -torch.inf).all()
    is_there = (state.salient_scores > -torch.inf)[..., None]
    sums = [(x.salient_keys[:, :, :held] * is_there).sum(2) for x in (found, state)]
    torch.testing.assert_close(*sums, rtol=0, atol=atol)
    for name, tensor in state.linear.tensors().items():
        torch.testing.assert_close(found.linear.tensors()[name], tensor, rtol=0, atol=atol)
