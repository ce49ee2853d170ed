"""A state sums features and values for attention alone: what a contrast or weights would need is not in it."""

import pytest
import torch

from nalaformer import LinearState, feature_map, recurrent_linear_attention
from nalaformer.ops import recurrent_step_


@pytest.mark.parametrize(
    "option", [{"contrast": "mean_score"}, {"key_weight": torch.ones(1, 1, 1)}], ids=lambda x: next(iter(x))
)
def test_decoding_with_a_contrast_or_weights_of_keys_is_refused(option):
    q = torch.randn(1, 1, 1, 4)
    elu = feature_map("elu", num_heads=1, head_dim=4)
    name = next(iter(option))
    with pytest.raises(TypeError, match=name):
        recurrent_linear_attention(q, q, q, feature_map=elu, **option)
    _, state = recurrent_linear_attention(q, q, q, feature_map=elu)
    assert isinstance(state, LinearState)
    with pytest.raises(TypeError, match=name):
        recurrent_step_(state, q, q, q, feature_map=elu, **option)
