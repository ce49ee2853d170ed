"""Facts hidden in a long text of known entropy, and questions about them at its end, in the style of RULER."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from .base import IGNORE, SEQUENCES, Arrays, SequenceData, SequenceFacts
from .filler import Filler

Ints = NDArray[np.int64]

MARK, LET, ASK, FIRST_WORD = 1, 2, 3, 4
FAMILIES = ("single", "multi_key", "multi_value", "variables", "induction")


@dataclass
class Riddle:
    """Hidden facts and questions about them. Every fact is three tokens."""

    facts: Ints
    """[n, 3], in the order in which they come in the text."""
    questions: Ints
    """[q, length]: each ends with its answer."""
    answer_length: int
    group: str


@dataclass(kw_only=True, eq=False)
class HiddenFacts(SequenceData):
    """A text of filler in which facts (three tokens each) are hidden, then questions; the next token is asked.

    single:       MARK name value                             ASK name -> value
    multi_key:    several of those, all names different
    multi_value:  each name with several values               ASK name -> all its values, in order of appearance
    variables:    LET a value, LET b a, LET c b, ...          ASK c -> value, after 1 to `hops` steps
    induction:    a b value, unmarked                         a b -> value

    `needles` is the number of facts (`single` has one); with `fewest_needles` it is drawn between the two, evenly on a log
    scale: an easy part in every batch, without which long texts are not learned. predict: "all" asks the next token
    everywhere (a language model), "answers" at the answers alone; `answers` marks them in either case.
    """

    stream_name = "needles"
    default_families: ClassVar[tuple[str, ...]] = FAMILIES

    length: int = 512
    families: Sequence[str] | None = None
    needles: int = 16
    fewest_needles: int = 0
    hops: int = 4
    values_per_name: int = 4
    questions: int = 4
    words: int = 64
    names: int = 256
    values: int = 256
    predict: str = "all"
    language: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds = tuple(self.default_families if self.families is None else self.families)
        if not self.kinds or set(self.kinds) - set(FAMILIES):
            raise ValueError(f"families must be some of {', '.join(FAMILIES)}, got {', '.join(self.kinds)}")
        if self.predict not in ("all", "answers"):
            raise ValueError(f'predict must be "all" or "answers", got {self.predict!r}')
        counts = (self.needles, self.hops, self.values_per_name, self.questions)
        if min(counts) < 1 or not 0 <= self.fewest_needles <= self.needles:
            raise ValueError(
                "needles, hops, values_per_name and questions must be positive and fewest_needles at most needles, got "
                f"{', '.join(map(str, counts))} and {self.fewest_needles}"
            )
        self.fewest_needles = self.fewest_needles or self.needles
        if self.needles > self.names:
            raise ValueError(f"every fact needs a name of its own: names must be at least {self.needles}, got {self.names}")
        answers = self.values_per_name if "multi_value" in self.kinds else 1
        most_facts = max(self.needles, answers, self.hops)
        needed = 3 * most_facts + self.questions * (2 + answers) + 3
        if needed > self.length:
            raise ValueError(f"{most_facts} facts and {self.questions} questions need a length of {needed}, got {self.length}")
        self.first_name = FIRST_WORD + self.words
        self.first_value = self.first_name + self.names
        steps = (f"variables, {step} {'hop' if step == 1 else 'hops'}" for step in range(1, self.hops + 1))
        self.groups = tuple(f for f in FAMILIES if f in self.kinds and f != "variables")
        self.groups += tuple(steps) if "variables" in self.kinds else ()
        self.chance = 1 / self.values

    @property
    def facts(self) -> SequenceFacts:
        vocabulary = self.first_value + self.values
        return SequenceFacts(answers="tokens", outputs=vocabulary, length=self.length, vocabulary=vocabulary)

    @cached_property
    def filler(self) -> Filler:
        """Filler text, of one language in all splits."""
        return Filler(words=self.words, seed=self.language)

    def make(self, indices: Ints) -> Arrays:
        # one token more: inputs and targets are the same text, moved by one
        texts = np.empty((len(indices), self.length + 1), np.int32)
        is_answer = np.zeros((len(indices), self.length), np.bool_)
        randoms = [self.generator_for(int(index)) for index in indices]
        words = self.filler.write(np.stack([random.random(self.length + 1) for random in randoms])) if randoms else texts
        group = np.zeros(len(indices), np.int64)
        for row, random in enumerate(randoms):
            riddle = self.riddle(random)
            asked = riddle.questions.size
            body = self.length + 1 - asked
            texts[row, :body] = hidden(riddle.facts, FIRST_WORD + words[row], body, random)
            texts[row, body:] = riddle.questions.ravel()
            marks = np.zeros(riddle.questions.shape, np.bool_)
            marks[:, -riddle.answer_length :] = True
            is_answer[row, body - 1 :] = marks.ravel()
            group[row] = self.groups.index(riddle.group)
        targets = texts[:, 1:]
        if self.predict == "answers":
            targets = np.where(is_answer, targets, IGNORE)
        return {"inputs": texts[:, :-1], "targets": targets, "answers": is_answer, "group": group}

    def riddle(self, random: Generator) -> Riddle:
        """Facts and questions of a random family."""
        family = self.kinds[int(random.integers(len(self.kinds)))]
        span = math.log(self.needles + 1) - math.log(self.fewest_needles)
        count = min(self.needles, int(self.fewest_needles * math.exp(random.random() * span)))
        if family == "single":
            return self.looked_up(random, 1, 1, family)
        if family == "multi_key":
            return self.looked_up(random, count, 1, family)
        if family == "multi_value":
            return self.looked_up(random, max(1, count // self.values_per_name), self.values_per_name, family)
        if family == "variables":
            steps = 1 + int(random.integers(self.hops))
            return self.make_chains(random, max(1, count // steps), steps)
        return self.make_phrases(random, count)

    def looked_up(self, random: Generator, names: int, each: int, family: str) -> Riddle:
        """Names with `each` values; some names are asked for all of theirs."""
        name, value = self.some_names(random, names), self.some_values(random, names * each).reshape(names, each)
        facts = np.empty((names * each, 3), np.int64)
        facts[places_in_order(random, names, each)] = np.stack(np.broadcast_arrays(MARK, name[:, None], value), axis=-1)
        asked = random.permutation(names)[: self.questions]
        questions = np.concatenate((np.full((len(asked), 1), ASK), name[asked, None], value[asked]), axis=1)
        return Riddle(facts=facts, questions=questions, answer_length=each, group=family)

    def make_chains(self, random: Generator, chains: int, steps: int) -> Riddle:
        """Chains of variables, each set to the one before it; the last of some chains are asked for the value of the first."""
        name, value = self.some_names(random, chains * steps).reshape(chains, steps), self.some_values(random, chains)
        source = np.concatenate((value[:, None], name[:, :-1]), axis=1)
        facts = np.empty((chains * steps, 3), np.int64)
        facts[places_in_order(random, chains, steps)] = np.stack(np.broadcast_arrays(LET, name, source), axis=-1)
        asked = random.permutation(chains)[: self.questions]
        questions = np.stack((np.full(len(asked), ASK), name[asked, -1], value[asked]), axis=1)
        group = f"variables, {steps} {'hop' if steps == 1 else 'hops'}"
        return Riddle(facts=facts, questions=questions, answer_length=1, group=group)

    def make_phrases(self, random: Generator, count: int) -> Riddle:
        """Phrases of three tokens; the first two of some are repeated."""
        second = self.first_name + random.integers(self.names, size=count)
        facts = np.stack((self.some_names(random, count), second, self.some_values(random, count)), axis=1)
        return Riddle(
            facts=facts, questions=facts[random.permutation(count)[: self.questions]], answer_length=1, group="induction"
        )

    def some_names(self, random: Generator, count: int) -> Ints:
        return self.first_name + random.permutation(self.names)[:count]

    def some_values(self, random: Generator, count: int) -> Ints:
        return self.first_value + random.integers(self.values, size=count)

    def is_filler(self, arrays: Arrays) -> NDArray[np.bool_]:
        """[B, N]: whether the target is a word of the filler, which the two words before it determine up to ENTROPY nats.

        Given that a word comes, and not a fact, its entropy is exactly ENTROPY: compare a model's loss over the words alone,
        its probabilities scaled to sum to one over the words.
        """
        before, target = arrays["inputs"], arrays["targets"]
        seen = ((before >= FIRST_WORD) & (before < self.first_name)).cumsum(axis=1) >= 2
        return seen & (target >= FIRST_WORD) & (target < self.first_name)


@SEQUENCES.register("recall_language")
class RecallLanguage(HiddenFacts):
    """All families in one mixture: the language of a small teacher."""


@SEQUENCES.register("needles")
class Needles(HiddenFacts):
    """The needles alone: single, multi_key and multi_value."""

    default_families = ("single", "multi_key", "multi_value")


@SEQUENCES.register("variables")
class Variables(HiddenFacts):
    """Variable tracking alone."""

    default_families = ("variables",)


def places_in_order(random: Generator, rows: int, columns: int) -> Ints:
    """All places 0..rows * columns - 1, dealt out at random, rising within each row: [rows, columns]."""
    return np.sort(random.permutation(rows * columns).reshape(rows, columns), axis=1)


def hidden(facts: Ints, words: NDArray[np.int32], length: int, random: Generator) -> NDArray[np.int32]:
    """The first words of a text with the facts between them, `length` tokens in all; every arrangement equally likely."""
    count, size = facts.shape
    starts = np.sort(random.choice(length - (size - 1) * count, count, replace=False)) + (size - 1) * np.arange(count)
    places = starts[:, None] + np.arange(size)
    text = np.empty(length, np.int32)
    is_word = np.ones(length, np.bool_)
    is_word[places] = False
    text[places] = facts
    text[is_word] = words[: length - facts.size]
    return text
