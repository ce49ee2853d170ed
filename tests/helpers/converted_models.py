"""Small decoders of many families, converted to hybrid attention."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nalaformer.attention.hybrid import HybridSettings
from nalaformer.models.hybrid.attention import converted_attentions
from nalaformer.models.hybrid.model import HybridForCausalLM
from nalaformer.training import TrainingConfig

SMALL = HybridSettings(chunk_size=8, salient_per_chunk=2, max_salient=6)
# of two layers with two key heads each: every kind of head that has steps, alone in a layer and side by side
BUDGET = [["salient", "full"], ["full", "window"]]
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "gemma": {"head_dim": 16},
    "olmo2": {},
    # scores of a scale of its own
    "granite": {"attention_multiplier": 0.3},
}


def make_model(family="llama", dtype=torch.float32, **changes):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **(sizes | heads | tokens | FAMILIES.get(family, {}) | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    # larger weights than those of a fresh model: attention that is all but uniform would hide mistakes
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(6 if "proj" in name else 3)
    return model


def converted(family="llama", settings=SMALL, budget=None, **options):
    model = HybridForCausalLM.convert(make_model(family, **options), settings, budget=budget).eval()
    with torch.no_grad():
        for attention in converted_attentions(model):
            for parameter in attention.hybrid.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def short_run(**changes):
    return TrainingConfig(
        **({"steps": 4, "batch_size": 4, "learning_rate": 1e-2, "weight_decay": 0.0, "device": "cpu"} | changes)
    )
