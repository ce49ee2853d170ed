"""A decoder of the Llama family with random weights, and its conversions: the models whose decoding is measured."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nalaformer.attention.hybrid import HybridSettings, hybrid_settings
from nalaformer.models.hybrid.attention import converted_attentions
from nalaformer.models.hybrid.model import HybridForCausalLM

SOFTMAX = "softmax"


@dataclass(frozen=True, kw_only=True)
class DecodeStudy:
    """A decoder of the Llama family, its conversions, and what is measured of them."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    chunk_size: int = 64
    salient_per_chunk: int = 4
    max_salient: int = 1024
    contexts: tuple[int, ...] = (8192, 32_768, 131_072)
    batches: tuple[int, ...] = (1, 8)
    """Samples that are decoded together; what does not fit is said so."""
    steps: int = 128
    """A chunk leaves the window once in as many steps as it has tokens: two of them belong to every measurement."""
    eager_steps: int = 12
    """Steps of the eager rows, which wait for the host; they have the smallest batch. 0: no such rows."""
    generated: int = 128
    """Tokens of the rows of `generate`, of the smallest batch; 0: no such rows."""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def methods(self) -> dict[str, HybridSettings | None]:
        """The settings of each method; None: softmax with a cache of all keys and values."""
        store = {"chunk_size": self.chunk_size, "salient_per_chunk": self.salient_per_chunk}
        capped = hybrid_settings("still", max_salient=self.max_salient, **store)
        return {
            SOFTMAX: None,
            f"still, at most {self.max_salient} salient": capped,
            "still, no cap": replace(capped, max_salient=0),
            "window": hybrid_settings("window", chunk_size=self.chunk_size),
        }


def build_decoder(study: DecodeStudy, settings: HybridSettings | None, *, device: str, dtype: torch.dtype) -> Any:
    """The softmax model, or the same one converted, with gates in its own type."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=study.width,
        intermediate_size=4 * study.width,
        num_hidden_layers=study.layers,
        num_attention_heads=study.heads,
        num_key_value_heads=study.key_heads,
        max_position_embeddings=2**18,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = with_fused_norms(model.to(dtype))
    if settings is not None:
        model = HybridForCausalLM.convert(model, settings)
        # steps are what each measurement says
        model.stepping = None
        for attention in converted_attentions(model):
            for part in attention.hybrid.parts:
                if part.gate is not None:
                    part.gate.to(dtype=dtype)
    return model.eval()


def with_fused_norms(model: Any) -> Any:
    """Replace every RMSNorm by torch's and return the model: one kernel, where transformers' norm takes six."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model
