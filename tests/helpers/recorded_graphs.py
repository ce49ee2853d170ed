"""CUDA graphs as a CPU can have them: the operations of a call, recorded once and run again on the very same tensors.

Like a graph, a recording reads inputs and weights where they were, runs no Python of the model, and cannot wait for a value.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, out))
        return out

    def replay(self):
        for operation, args, kwargs, out in self.operations:
            given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            for kept, new in zip(tensors(out), tensors(operation(*args, **kwargs)), strict=True):
                # views and what is written in place have their values already
                if kept.numel() and kept.untyped_storage().data_ptr() not in given:
                    kept.copy_(new)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def recorded(call, *, restore=(), device=None):
    """In the place of nalaformer.ops.graphs.captured."""
    before = [tensor.clone() for tensor in restore]
    recording = Recording()
    call()
    with recording:
        call()
    for tensor, old in zip(restore, before, strict=True):
        tensor.copy_(old)
    return recording.replay
