"""A start from which a decoder learns recall within hundreds of steps instead of thousands.

Looking something up takes two layers: one writes into every token which token stands before it, the next finds the token whose
predecessor is the one asked for. From small random weights neither has a gradient before the other works, and a long plateau
passes first (Singh et al., 2024). Here both exist faintly from the start, in the manner of mimetic initialisation (Trockman and
Kolter, 2023), and training has only to sharpen them. The architecture is Llama's, unchanged.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

# a channel pair that rotates by less per token does not tell neighbors apart
FASTEST = 0.3
# logit of the token before in the heads that look there
PEAK = 16.0
# scale of matching queries and keys: with PEAK, a question gives the right token ten times the weight of a wrong one
GAIN = 2.0
# scale with which the token before is written
LOUDNESS = 2.0
# layers
LOOKING_BACK = 2


@torch.no_grad()
def start_for_recall_(model: Any) -> None:
    """Set the weights of a LlamaForCausalLM; random numbers are torch's global ones.

    Tokens: random directions, and one that all share, by which positions can be compared. The output reads the former.
    Two layers: half of the heads look at the token before and write it rotated by a random matrix, apart from the token itself.
    All other heads: keys turn that back and are projected as queries are, so a query finds the token whose predecessor it is,
    or in later layers whose two predecessors; outputs undo the projection of values. MLPs add nothing yet.
    """
    width = model.config.hidden_size
    tokens = model.model.embed_tokens.weight.normal_()
    model.lm_head.weight.copy_(tokens / math.sqrt(width))
    shared = nn.functional.normalize(torch.randn(width), dim=0)
    tokens.add_(math.sqrt(width) * shared)
    aside = nn.init.orthogonal_(torch.empty(width, width))
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        like = torch.randn_like(attention.k_proj.weight) * GAIN / math.sqrt(width)
        attention.q_proj.weight.copy_(for_queries(like, attention))
        attention.k_proj.weight.copy_(like @ aside.T)
        value = nn.init.orthogonal_(attention.v_proj.weight)
        value -= torch.outer(value @ shared, shared)
        # heads that share values give their mean
        attention.o_proj.weight.copy_(for_queries(value, attention).T / attention.num_key_value_groups)
        layer.mlp.down_proj.weight.zero_()
        if number < LOOKING_BACK:
            look_back_(attention, shared, aside, speeds=model.model.rotary_emb.inv_freq)


def look_back_(attention: Any, shared: Tensor, aside: Tensor, *, speeds: Tensor) -> None:
    """Make half of the heads compare positions alone: a query is a key rotated back by one token, in the fast channels."""
    head_dim, group = attention.head_dim, attention.num_key_value_groups
    fast = speeds[speeds >= FASTEST]
    angle = 2 * math.pi * torch.rand(len(fast))
    # the shared part is half of a normalised token: its square is width / 2
    size = math.sqrt(PEAK * math.sqrt(head_dim) / (len(fast) * len(shared) / 2))
    key, query = (size * on_circles(a, head_dim)[:, None] * shared for a in (angle, angle - fast))
    heads = max(1, attention.k_proj.weight.shape[0] // head_dim // 2)
    attention.k_proj.weight[: heads * head_dim] = key.repeat(heads, 1)
    attention.q_proj.weight[: heads * group * head_dim] = query.repeat(heads * group, 1)
    written = attention.o_proj.weight[:, : heads * group * head_dim]
    written.copy_(LOUDNESS * aside @ written)


def on_circles(angle: Tensor, head_dim: int) -> Tensor:
    """Unit vectors in the first channel pairs, which Llama keeps half a head apart: [head_dim]."""
    channels = torch.zeros(2, head_dim // 2)
    channels[:, : len(angle)] = torch.stack((angle.cos(), angle.sin()))
    return channels.flatten()


def for_queries(weight: Tensor, attention: Any) -> Tensor:
    """[key heads * head_dim, C] -> [heads * head_dim, C]."""
    heads = weight.unflatten(0, (-1, attention.head_dim))
    return heads.repeat_interleave(attention.num_key_value_groups, dim=0).flatten(0, 1)
