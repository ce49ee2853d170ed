"""The frozen weights of a large model spread over the processes of a run (FSDP2); what learns stays whole on each.

Checkpoints, the optimiser and the gradients then are those of plain data parallelism, and small; memory goes to the frozen
weights, and those are what is cut into pieces.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..models.hybrid.attention import converted_attentions
from ..models.hybrid.model import HybridForCausalLM
from ..models.hybrid.support import decoder_layers
from .trainable import Trainable


def shard_frozen_(model: HybridForCausalLM, trainable: Trainable) -> None:
    """Cut the frozen parameters of every layer, and of the rest, over all processes, once; they must have met."""
    from torch.distributed.fsdp import fully_shard

    trainable.is_collective = True
    if not is_sharded(model):
        learned = set(trainable.learned().values())
        # a later stage may learn these
        for attention in converted_attentions(model):
            learned |= set(attention.hybrid.parameters())
        for layer in decoder_layers(model.host):
            fully_shard(layer, ignored_params=learned & set(layer.parameters()))
        fully_shard(model.host, ignored_params=learned & set(model.host.parameters()))
    hide_from_ddp(trainable)


def hide_from_ddp(trainable: Trainable) -> None:
    """Data parallelism sees the parameters that learn and nothing else."""
    learned: dict[str, Any] = {f"model.{name}": value for name, value in trainable.learned().items()}
    others = [name for name, _ in (*trainable.named_parameters(), *trainable.named_buffers()) if name not in learned]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainable, others)


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(model: nn.Module, empty: nn.Module) -> nn.Module:
    """`empty`, a model of the same shape that was never cut, with the weights of `model`; all processes must call it."""
    from torch.distributed.tensor import DTensor

    state = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }
    # what is not among the parameters follows from the config
    empty.load_state_dict(state, strict=False)
    return empty
