"""Long texts with facts hidden in them and questions at the end, made on the device, a batch at a time.

A text is filler with facts at random places, and questions about them as its last tokens. The answer to each question follows
it, so that one text asks many times; only answers are predicted. Kinds:

    needles     facts MARK key value;             question ASK key -> value
    variables   facts SET name value, SET name2 name, ...; question ASK the last name of a chain -> its value
    induction   a row of random tokens somewhere; its beginning again -> each token that follows
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ..registry import unknown_name

IGNORED = -100
MARK, ASK, SET = 0, 1, 2
KINDS = ("needles", "variables", "induction")


@dataclass(frozen=True, kw_only=True)
class RecallTask:
    """One kind of text. Tokens: 3 signs, then filler, keys, values."""

    kind: str
    """needles, variables or induction."""
    facts: int = 32
    """Needles, chains of variables, or tokens of the row that comes again."""
    questions: int = 16
    """Of needles and variables; more than facts: some are asked again, which helps to learn and measures less."""
    hops: int = 2
    """Assignments from a value to the last name of its chain."""
    filler: int = 32
    keys: int = 128
    values: int = 32

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind", self.kind, KINDS)
        names = self.facts * (self.hops if self.kind == "variables" else 1)
        if self.kind != "induction" and names > self.keys:
            raise ValueError(f"each fact needs a key of its own, got {names} names for {self.keys} keys")

    @property
    def vocab_size(self) -> int:
        return 3 + self.filler + self.keys + self.values

    @property
    def shortest(self) -> int:
        """Tokens of a text without filler to spare."""
        if self.kind == "induction":
            return 2 * self.facts + 4
        return 4 * self.facts * (self.hops if self.kind == "variables" else 1) + 3 * self.questions

    def batch(self, size: int, length: int, random: Generator) -> tuple[Tensor, Tensor]:
        """Token ids [size, length] and targets, the id that follows where an answer does, IGNORED elsewhere."""
        if length < self.shortest:
            raise ValueError(f"a text of {self.kind} with these facts takes at least {self.shortest} tokens, got {length}")
        device = random.device
        text = torch.randint(3, 3 + self.filler, (size, length + 1), generator=random, device=device)
        write = self._induction if self.kind == "induction" else self._facts
        is_answer = write(text, size, length + 1, random)
        targets = text[:, 1:].masked_fill(~is_answer[:, 1:], IGNORED)
        return text[:, :-1], targets

    def _facts(self, text: Tensor, size: int, length: int, random: Generator) -> Tensor:
        device = random.device
        hops = self.hops if self.kind == "variables" else 1
        first_key, first_value = 3 + self.filler, 3 + self.filler + self.keys
        names = first_key + order(size, self.keys, random)[:, : self.facts * hops].view(size, self.facts, hops)
        values = torch.randint(first_value, first_value + self.values, (size, self.facts, 1), generator=random, device=device)
        # what a name stands for: the value, then the name before it
        meanings = torch.cat((values, names[..., :-1]), dim=-1)
        sign = torch.full_like(names, SET if self.kind == "variables" else MARK)
        triples = torch.stack((sign, names, meanings), dim=-1).flatten(1, 2)  # [size, facts * hops, 3]
        tail = 3 * self.questions
        # cells of four tokens, so that facts do not touch; a chain is written from its value on
        cells = order(size, (length - tail) // 4, random)[:, : self.facts * hops]
        cells = cells.view(size, self.facts, hops).sort(-1).values.flatten(1)
        places = 4 * cells[..., None] + torch.arange(3, device=device)
        text.scatter_(1, places.flatten(1), triples.flatten(1))
        rounds = -(-self.questions // self.facts)
        asked = torch.cat([order(size, self.facts, random) for _ in range(rounds)], dim=1)[:, : self.questions]
        answers, last_names = values[..., 0].gather(1, asked), names[..., -1].gather(1, asked)
        text[:, length - tail :] = torch.stack((torch.full_like(answers, ASK), last_names, answers), dim=-1).flatten(1)
        is_answer = torch.zeros_like(text, dtype=torch.bool)
        is_answer[:, length - tail + 2 :: 3] = True
        return is_answer

    def _induction(self, text: Tensor, size: int, length: int, random: Generator) -> Tensor:
        device = random.device
        first = 3 + self.filler
        row = first + torch.randint(0, self.keys, (size, self.facts), generator=random, device=device)
        start = torch.randint(0, length - 2 * self.facts - 1, (size, 1), generator=random, device=device)
        text.scatter_(1, start + torch.arange(self.facts, device=device), row)
        text[:, length - self.facts :] = row
        is_answer = torch.zeros_like(text, dtype=torch.bool)
        # the first tokens only say where the row begins
        is_answer[:, length - self.facts + 2 :] = True
        return is_answer


def order(size: int, number: int, random: Generator) -> Tensor:
    """[size, number]: the numbers below `number` in random order."""
    return torch.rand(size, number, generator=random, device=random.device).argsort(dim=-1)


def accuracy(logits: Tensor, targets: Tensor) -> tuple[int, int]:
    """Right answers, and questions."""
    is_answer = targets != IGNORED
    return int((logits.argmax(-1) == targets)[is_answer].sum()), int(is_answer.sum())
