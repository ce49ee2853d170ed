"""Generate text from a prompt, word by word as it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TextStreamer, set_seed

from .lengths import length_note


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of a prompt."""

    text: str
    """The prompt and its continuation, decoded together so that words are separated correctly."""
    num_tokens: int
    """The number of new tokens."""
    cache_bytes: int | None
    """Bytes of the cache after the last token; None for models of other families."""
    note: str = ""
    """A warning if the text is longer than the model was trained for."""


class Writer:
    """A causal language model and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def write(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        say: Callable[[str], object] | None = None,
    ) -> Written:
        """Continue the prompt. temperature 0 takes the likeliest token each time; say receives prompt and text as they come."""
        if not prompt:
            raise ValueError("the prompt must hold at least one token, got none; pass --prompt with some text")
        if max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, temperature at least 0, top_p above 0 and at most 1, got "
                f"{max_new_tokens}, {temperature} and {top_p}"
            )
        if seed is not None:
            set_seed(seed)
        # only these options decide: transformers would sample from 50 tokens, and a model's folder may set more
        drawing: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
        if temperature > 0:
            drawing |= {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        inputs.pop("token_type_ids", None)
        length = inputs["input_ids"].shape[1]
        # the last token is not an input
        length_note(self.model, length + max_new_tokens - 1)
        done = self.model.generate(
            **inputs,
            **drawing,
            max_new_tokens=max_new_tokens,
            pad_token_id=self._padding(),
            streamer=None if say is None else _Streamer(self.tokenizer, say),
            return_dict_in_generate=True,
        )
        return Written(
            text=self.tokenizer.decode(done.sequences[0], skip_special_tokens=True),
            num_tokens=done.sequences.shape[1] - length,
            # our own caches know their size, transformers' do not
            cache_bytes=getattr(done.past_key_values, "nbytes", None),
            note=length_note(self.model, done.sequences.shape[1] - 1),
        )

    def _padding(self) -> int | None:
        """Return a padding token: any will do for one row, and transformers warns without one."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), None)


class _Streamer(TextStreamer):
    """A streamer that passes finished words to a function instead of printing them."""

    def __init__(self, tokenizer: Any, say: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.say(text)
