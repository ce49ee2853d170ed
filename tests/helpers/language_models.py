"""Small language models of every layout, and text for them."""

import pytest
import torch

from helpers.products import FULL
from nalaformer.models.language import NaLaConfig, NaLaForCausalLM

VOCABULARY = 61
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
# every mixer by itself, one list of several, and the options that change the path of a token
LAYOUTS = {
    "linear": {},
    "linear+rotary+grouped": {"linear_rotary": True, "num_key_value_heads": 1, "short_convolution": 0},
    "linear+polarity": {"feature_map": "polarity"},
    "forgetting": {"mixers": "forgetting"},
    "forgetting+rotary+grouped": {
        **{"mixers": "forgetting", "linear_rotary": True, "num_key_value_heads": 1, "short_convolution": 0}
    },
    "linear+contrast": {"feature_map": "channel_softmax", "contrast": "learned", "contrast_offset": -0.75},
    "forgetting+contrast+grouped": {
        **{"mixers": "forgetting", "contrast": "learned", "num_key_value_heads": 1, "linear_rotary": True},
    },
    "delta": {"mixers": "delta"},
    "gated_delta": {"mixers": "gated_delta"},
    "softmax": {"mixers": "softmax", "num_key_value_heads": 1},
    "hybrid": {"mixers": ["gated_delta", "softmax"]},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
# every mixer and every option of LAYOUTS occurs in one of these: for tests that generate
MAIN_LAYOUTS = ["linear+rotary+grouped", "linear+polarity", "forgetting+contrast+grouped", "delta", "hybrid"]
main_layouts = pytest.mark.parametrize("layout", LAYOUTS if FULL else MAIN_LAYOUTS)


def make(layout: str = "linear", *, dtype: torch.dtype = torch.float64, **changes) -> NaLaForCausalLM:
    """A small model with weights away from their start, which is nearly linear."""
    config = NaLaConfig.from_size("nano", **({"vocab_size": VOCABULARY} | LAYOUTS[layout] | changes))
    model = NaLaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def text(*shape: int) -> torch.Tensor:
    # none of them is 0: generate takes tokens that look like padding for padding
    return torch.randint(1, VOCABULARY, shape)


def padded_prompts() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[1, :7], mask[2, :19] = 0, 0
    return {"input_ids": text(3, 20), "attention_mask": mask}
