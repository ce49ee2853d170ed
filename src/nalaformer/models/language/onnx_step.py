"""A decoding step of a language model as an ONNX program: from a token and the states to logits and the next states."""

import warnings
from os import PathLike

import torch
from torch import Tensor, nn

from .cache import NaLaCache, RecurrentLayer
from .config import RECURRENT_MIXERS
from .model import NaLaForCausalLM


class LanguageStep(nn.Module):
    """One decoding step: tokens [B, 1], positions [B, 1] and the states -> logits [B, vocabulary] and the next states.

    The states are in the order of `names`, as in `first_states`.
    """

    def __init__(self, model: NaLaForCausalLM) -> None:
        super().__init__()
        exact = [mixer for mixer in model.config.layer_mixers if mixer not in RECURRENT_MIXERS]
        if exact:
            raise ValueError(
                f"a step has states of one size, got {len(exact)} layers with {exact[0]!r} mixers, whose keys grow with the "
                "text; export a model with recurrent mixers alone"
            )
        self.model = model
        self.names = list(self.first_states(1))

    @torch.no_grad()
    def first_states(self, batch: int) -> dict[str, Tensor]:
        """Return the states before the first token, by name."""
        cache = NaLaCache(self.model.config)
        # run one token to learn the sizes
        self.model(torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device), past_key_values=cache)
        return {name: torch.zeros_like(tensor) for name, tensor in cache.tensors().items()}

    def forward(self, tokens: Tensor, positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        cache = NaLaCache(self.model.config)
        for name, state in zip(self.names, states, strict=True):
            _, number, part = name.split(".")
            layer = cache.layers[int(number)]
            assert isinstance(layer, RecurrentLayer)
            # clone, since steps write into the state, and a program must not change its inputs
            layer.tensors[part] = state.clone()
            layer.seen = 1
        out = self.model(tokens, position_ids=positions, past_key_values=cache)
        after = cache.tensors()
        return (out.logits[:, 0], *(after[name] for name in self.names))


def export_step(model: NaLaForCausalLM, path: str | PathLike[str]) -> list[str]:
    """Write a step as ONNX, for any batch size; return the names of the states.

    Inputs: `tokens`, `positions`, and the states under their names. Outputs: `logits`, and the states as `after.<name>`.
    """
    # checked first, since torch's error says less about what is missing
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401

    step = LanguageStep(model).eval()
    states = step.first_states(2)
    inputs = (torch.ones(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64), *states.values())
    batch = torch.export.Dim("batch", min=1, max=4096)
    with torch.no_grad(), warnings.catch_warnings():
        # all inputs share one batch size, which is intended
        warnings.filterwarnings("ignore", message="# The axis name: batch will not be used", module=r"torch\.onnx")
        program = torch.onnx.export(
            step,
            inputs,
            dynamo=True,
            verbose=False,
            input_names=["tokens", "positions", *step.names],
            output_names=["logits", *(f"after.{name}" for name in step.names)],
            dynamic_shapes=({0: batch}, {0: batch}, tuple({0: batch} for _ in states)),
        )
    assert program is not None
    program.save(path)
    return step.names
