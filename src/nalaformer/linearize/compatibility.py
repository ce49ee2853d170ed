"""Whether a model can be converted: tried out before any work."""

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.hybrid import hybrid_settings
from ..models.hybrid.cache import HybridCache
from ..models.hybrid.config import HybridConfig
from ..models.hybrid.model import HybridForCausalLM, positions, restore_attention_
from ..models.hybrid.support import check_config, decoder_layers
from ..weight_files import check_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# logits of a model and of its conversion with every token exact differ by rounding alone
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float64: 1e-6}
# of the sequences on which they are compared, in chunks of 8
PROBE_TOKENS, PROBE_PADDING = 29, 5


@torch.no_grad()
def check_model(model: "PreTrainedModel") -> None:
    """Refuse a model that, converted with every token exact, would not be what it was; it is left as it came.

    Compared are the logits of whole sequences of several chunks, of a padded batch, and of its pieces after a cache. And its
    config must build it again, as loading does.
    """
    check_config(model.config)
    decoder_layers(model)
    check_finite(model.state_dict(), type(model).__name__)
    # two samples of several chunks, the second with padding at its beginning
    tokens = torch.arange(2 * PROBE_TOKENS, device=model.device).view(2, -1) % model.config.vocab_size
    visible = torch.ones_like(tokens)
    visible[1, :PROBE_PADDING] = 0
    padded = {"attention_mask": visible, "position_ids": positions(visible)}
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    expected = {
        "a whole sequence": model(input_ids=tokens, use_cache=False).logits,
        "a padded batch": model(input_ids=tokens, **padded, use_cache=False).logits,
    }
    trial = HybridForCausalLM.convert(model, hybrid_settings("softmax", chunk_size=8))
    try:
        found = {
            "a whole sequence": trial(input_ids=tokens, use_cache=False).logits,
            "a padded batch": trial(input_ids=tokens, attention_mask=visible, use_cache=False).logits,
            "a padded batch, piece by piece with a cache,": in_pieces(trial, tokens, visible),
        }
        check_reload(trial)
    finally:
        restore_attention_(model)
        model.set_attn_implementation(implementation)
        model.train(was_training)
    for what, after in found.items():
        before = expected[what.split(",")[0]]
        if "padded" in what:
            before, after = (logits[visible.bool()] for logits in (before, after))
        difference = (before - after).abs().max().item()
        largest = LARGEST_DIFFERENCE.get(before.dtype, 0.1) * max(1.0, before.abs().max().item())
        if not difference <= largest:
            raise ValueError(
                f"{type(model).__name__} attends in a way of its own: with exact attention in its place its logits of {what} "
                f"differ by {difference:.2g}; it cannot be converted"
            )


def in_pieces(model: HybridForCausalLM, tokens: Tensor, visible: Tensor) -> Tensor:
    """Logits of some tokens, of one more, and of the rest, each after what the cache holds of those before."""
    cache, start, found = HybridCache(model.config), 0, []
    for stop in (PROBE_TOKENS // 2 + 1, PROBE_TOKENS // 2 + 2, PROBE_TOKENS):
        mask, piece = visible[:, :stop], tokens[:, start:stop]
        found.append(model(input_ids=piece, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
        start = stop
    return torch.cat(found, dim=1)


def check_reload(model: HybridForCausalLM) -> None:
    """Refuse a model that its saved config would not build again; nothing is allocated for the copy."""
    config = HybridConfig.from_dict(json.loads(model.config.to_json_string()))
    name = type(model.host).__name__
    try:
        with torch.device("meta"):
            again = HybridForCausalLM(config)
    except Exception as error:  # whatever the model's own code does there
        raise ValueError(f"{name} cannot be converted: its converted form could not be loaded again ({error})") from error
    saved, built = ({key: tensor.shape for key, tensor in each.state_dict().items()} for each in (model, again))
    if saved != built:
        odd = sorted(key for key in saved.keys() | built.keys() if saved.get(key) != built.get(key))
        raise ValueError(
            f"{name} cannot be converted: loaded again, {len(odd)} of its tensors would not be what was saved ({odd[0]}, ...)"
        )
