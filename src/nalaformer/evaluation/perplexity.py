"""Perplexity of a text in windows that overlap: every token is scored once, with context before it.

A window of W tokens moves by S. Its last S tokens are scored, so each has at least W - S tokens before it (fewer only where
the document itself has fewer). A document starts with the start token, which is not scored.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.text import Reading, find_text, read_documents, start_token
from ..data.text.tokenizer import encode
from ..tasks.language import perplexity_of
from .loading import LanguageModel


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Sums over a text; the figures follow from them."""

    nats: float
    """Sum of -log p over all tokens."""
    tokens: int
    words: int
    """Parts between white space."""
    bytes: int
    documents: int
    bad: tuple[str, ...] = ()
    """What could not be read and was left out."""

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.loss)

    @property
    def word_perplexity(self) -> float:
        return perplexity_of(self.nats / max(self.words, 1))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def score_text(
    language_model: LanguageModel,
    files: Sequence[str | Path],
    *,
    window: int = 2048,
    stride: int = 512,
    batch_size: int = 8,
    field: str = "text",
    advance: Callable[[int], None] = lambda count: None,
) -> TextScore:
    """Score every token of the files' documents, each document for itself.

    field: name of the text in .jsonl files. `advance` is told the tokens as they are scored.
    """
    model, tokenizer = language_model.model, language_model.tokenizer
    bad: list[str] = []
    nats, tokens, words, size, documents = 0.0, 0, 0, 0, 0
    for document in read_documents(find_text(files), Reading(field=field, bad=bad.append)):
        ids = [start_token(tokenizer), *encode(tokenizer, [document.text])[0]]
        losses = token_losses(model, torch.tensor(ids), window=window, stride=stride, batch_size=batch_size, advance=advance)
        nats += losses.double().sum().item()
        tokens += len(losses)
        words += len(document.text.split())
        size += len(document.text.encode())
        documents += 1
    if not tokens:
        raise ValueError(f"perplexity needs a text, got none that could be read{f'; the first: {bad[0]}' if bad else ''}")
    return TextScore(nats=nats, tokens=tokens, words=words, bytes=size, documents=documents, bad=tuple(bad))


@torch.no_grad()
def token_losses(
    model: Any,
    tokens: Tensor,
    *,
    window: int,
    stride: int,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """-log p of tokens 1..N-1 of a sequence [N], float32 [N - 1], each with at least window - stride tokens before it."""
    from ..models.language.lengths import length_note

    if not 1 <= stride < window:
        raise ValueError(f"stride must be at least 1 and below the window ({window}), got {stride}")
    losses = torch.full((len(tokens) - 1,), torch.nan)
    # the windows are equally long, so they make batches; the last one is moved back from the end of the text
    length = min(window, len(tokens))
    length_note(model, length)
    starts = sorted({min(start, len(tokens) - length) for start in range(0, max(len(tokens) - length, 0) + stride, stride)})
    scored = 1
    for first in range(0, len(starts), batch_size):
        part = starts[first : first + batch_size]
        batch = torch.stack([tokens[start : start + length] for start in part]).to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits.float()
        all_losses = (
            F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(len(part), -1).cpu()
        )
        for start, row in zip(part, all_losses, strict=True):
            end = start + length
            # row[j] is the loss of token start + j + 1
            losses[scored - 1 : end - 1] = row[scored - start - 1 :]
            advance(end - scored)
            scored = end
    return losses
