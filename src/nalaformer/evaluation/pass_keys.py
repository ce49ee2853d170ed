"""Pass keys: five digits hidden in a real text, asked for at its end.

The plainest question to a long memory: a model that has lost the place cannot guess, one that has it needs no skill.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PHRASES = (
    ("\nThe pass key is {key}. Remember it. {key} is the pass key.\n", "\nWhat is the pass key? The pass key is"),
    ("\nThe secret code for the door is {key}.\n", "\nThe secret code for the door is"),
    (
        "\nNote: the order number of this customer is {key}.\n",
        "\nWhat is the order number of this customer? The order number is",
    ),
)
"""How a key is hidden, and how it is asked for."""
DIGITS = 5


@dataclass(frozen=True)
class PassKey:
    """A prompt of token ids [N], the digits that are asked for, and where they stand: 0 the beginning, 1 the end."""

    tokens: Tensor
    answer: str
    depth: float


def make_pass_keys(
    tokenizer: Any,
    haystack: Sequence[int] | Tensor,
    *,
    length: int,
    count: int,
    phrase: tuple[str, str] = PHRASES[0],
    seed: int = 0,
) -> list[PassKey]:
    """Return prompts of exactly `length` tokens, of which the keys stand at evenly drawn depths of the haystack's text."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.as_tensor(haystack, dtype=torch.int64)
    question = _ids(tokenizer, phrase[1])
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    found = []
    for number in range(count):
        answer = "".join(str(int(digit)) for digit in torch.randint(0, 10, (DIGITS,), generator=generator))
        needle = _ids(tokenizer, phrase[0].format(key=answer))
        room = length - len(begin) - len(needle) - len(question)
        if room < 1 or room > len(ids):
            raise ValueError(
                f"length must leave room for the key and not exceed the haystack: {len(needle) + len(question) + len(begin)} "
                f"tokens are the key's, the haystack has {len(ids)}, got length {length}"
            )
        start = int(torch.randint(len(ids) - room + 1, (1,), generator=generator))
        depth = (number + 0.5) / count
        place = round(depth * room)
        text = ids[start : start + room].tolist()
        tokens = torch.tensor([*begin, *text[:place], *needle, *text[place:], *question])
        found.append(PassKey(tokens, answer, depth))
    return found


@torch.no_grad()
def find_pass_keys(
    model: Any, tokenizer: Any, keys: Sequence[PassKey], *, batch_size: int = 8, advance: Callable[[int], None] = lambda n: None
) -> list[bool]:
    """Return which keys the model says, generating freely; all prompts must have one length."""
    found = []
    device = next(model.parameters()).device
    for first in range(0, len(keys), batch_size):
        some = keys[first : first + batch_size]
        said = _continue(model, torch.stack([key.tokens for key in some]).to(device), 2 * DIGITS)
        for key, ids in zip(some, said.tolist(), strict=True):
            digits = "".join(letter for letter in tokenizer.decode(ids).split("\n")[0] if letter.isdigit())
            found.append(digits.startswith(key.answer))
        advance(len(some))
    return found


def _continue(model: Any, tokens: Tensor, number: int) -> Tensor:
    """Return the likeliest next tokens [B, number] one by one."""
    out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    said = [out.logits[:, -1:].argmax(-1)]
    while len(said) < number:
        out = model(input_ids=said[-1], past_key_values=out.past_key_values, use_cache=True)
        said.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(said, dim=1)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
