"""ListOps of the Long Range Arena: nested lists of digits, each reduced by an operator; the label is the value of the whole.

All trees of a batch grow level by level as flat arrays. The distribution is that of the recursive generator: a node's fate does
not depend on the order in which nodes are visited.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base import SEQUENCES, Arrays, SequenceData, SequenceFacts
from .random_numbers import RandomKeys, child_keys, integers, uniform_at

Ints = NDArray[np.int64]

OPERATORS = ("MIN", "MAX", "MED", "SM")
PAD, FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 0, 1, 11, 15
WORDS = ("<pad>", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")
OPERATOR_SHARE = 0.25
# shortest, longest, depth, arguments; and what little is needed to be right there how often
PUBLISHED = (500, 2000, 10, 10)
SHORTCUTS = {"majority": 0.17, "root operator": 0.36, "root operator and its digits": 0.457}
# tries of one sample that are grown side by side; about one in twelve has the right length
ATTEMPTS = 16


@dataclass
class Level:
    """The nodes of one depth in all trees, those of a tree and of a parent side by side."""

    tree: Ints
    code: Ints
    """A digit 0..9 or an operator 0..3."""
    arguments: Ints
    """Number of children; 0: a digit."""

    @property
    def is_operator(self) -> NDArray[np.bool_]:
        return self.arguments > 0


@SEQUENCES.register("listops")
@dataclass(kw_only=True, eq=False)
class ListOps(SequenceData):
    """[MAX 4 [MIN 2 9 ] 7 ]: what is the value? Operators open a list and brackets close it.

    A node above depth `max_depth` is an operator with probability 1/4, with 2..`max_arguments` arguments; MED is the integer
    part of the median, SM the sum modulo 10. The length (one per digit, two per operator) lies strictly between `shortest` and
    `longest`. Tokens: 0 padding, 1..10 digits, 11..14 operators, 15 the closing bracket.
    """

    stream_name = "listops"
    chance = 0.1
    brackets = True

    shortest: int = 500
    longest: int = 2000
    max_depth: int = 10
    max_arguments: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest, max_depth, max_arguments = self.shortest, self.longest, self.max_depth, self.max_arguments
        if not 2 <= max_arguments <= 10 or max_depth < 2:
            raise ValueError(f"max_arguments must be 2..10 and max_depth at least 2, got {max_arguments} and {max_depth}")
        if shortest < 3 or longest < shortest + 10:
            raise ValueError(f"lengths must leave room: shortest >= 3, longest >= shortest + 10, got {shortest} and {longest}")
        if (shortest, longest, max_depth, max_arguments) == PUBLISHED:
            self.shortcuts = SHORTCUTS

    @property
    def facts(self) -> SequenceFacts:
        # to the next multiple of 64: 2000 are padded to 2048, as published
        return SequenceFacts(answers="sequence", outputs=10, length=-(-self.longest // 64) * 64, vocabulary=16, is_padded=True)

    def make(self, indices: Ints) -> Arrays:
        tokens = np.zeros((len(indices), self.facts.length), np.uint8)
        labels = np.zeros(len(indices), np.int64)
        # in chunks: the trees of a chunk fit into the cache
        for start in range(0, len(indices), 64):
            piece = slice(start, start + 64)
            levels = grow_trees(self.accept_keys(self.random_keys(indices[piece])), self.max_depth, self.max_arguments)
            tokens[piece] = write_tokens(levels, len(indices[piece]), self.facts.length, brackets=self.brackets)
            labels[piece] = values(levels)
        return {"inputs": tokens, "targets": labels}

    def accept_keys(self, keys: RandomKeys) -> RandomKeys:
        """For each sample the key of the first tree whose length is right."""
        found = np.zeros_like(keys)
        pending = np.arange(len(keys))
        for first in range(0, 1_000_000, ATTEMPTS):
            tries = np.stack([child_keys(keys[pending], first + number) for number in range(ATTEMPTS)], axis=1)
            lengths = np.zeros(tries.size, np.int64)
            for level in grow_trees(tries.ravel(), self.max_depth, self.max_arguments):
                lengths += np.bincount(level.tree, weights=1 + level.is_operator, minlength=tries.size).astype(np.int64)
            fits = ((self.shortest < lengths) & (lengths < self.longest)).reshape(tries.shape)
            done = fits.any(axis=1)
            found[pending[done]] = tries[done, fits[done].argmax(axis=1)]
            pending = pending[~done]
            if not len(pending):
                return found
        raise ValueError(
            f"no tree of depth {self.max_depth} is between {self.shortest} and {self.longest} long; allow other lengths"
        )


@SEQUENCES.register("listops_sky")
class ListOpsWithoutBrackets(ListOps):
    """ListOps without closing brackets, as Skyformer's tokenizer shows them: the data of the published small models.

    Where a list ends cannot be told, so the label is no longer a function of the tokens: accuracy has a ceiling below one.
    """

    brackets = False


def grow_trees(keys: RandomKeys, max_depth: int, max_arguments: int) -> list[Level]:
    """One random tree for each key, level by level."""
    levels: list[Level] = []
    tree = np.arange(len(keys))
    for depth in range(1, max_depth + 1):
        number = np.arange(len(tree)) - np.searchsorted(tree, tree)  # within its tree's level
        node_keys = child_keys(keys, depth)[tree]
        fate, code, arguments = (uniform_at(node_keys, 3 * number + part) for part in range(3))
        is_operator = (fate < OPERATOR_SHARE) & (depth < max_depth)
        level = Level(
            tree=tree,
            code=np.where(is_operator, integers(code, len(OPERATORS)), integers(code, 10)),
            arguments=np.where(is_operator, 2 + integers(arguments, max_arguments - 1), 0),
        )
        levels.append(level)
        tree = np.repeat(level.tree, level.arguments)
        if not len(tree):
            break
    return levels


def first_children(level: Level) -> Ints:
    """For each operator, the place of its first child in the next level."""
    arguments = level.arguments[level.is_operator]
    return np.cumsum(arguments) - arguments


def values(levels: list[Level]) -> Ints:
    """The value of each tree, from the leaves up."""
    below = np.zeros(0, np.int64)
    for level in reversed(levels):
        result = level.code.copy()
        operators = level.is_operator
        if operators.any():
            starts, counts = first_children(level), level.arguments[operators]
            ordered = below[np.lexsort((below, np.repeat(np.arange(len(starts)), counts)))]
            median = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
            total = np.add.reduceat(below, starts) % 10
            results = np.stack((ordered[starts], ordered[starts + counts - 1], median, total))
            result[operators] = results[level.code[operators], np.arange(len(starts))]
        below = result
    return below


def write_tokens(levels: list[Level], trees: int, length: int, *, brackets: bool) -> NDArray[np.uint8]:
    """The trees as rows of tokens in reading order: [trees, length], padded with zeros."""
    # tokens below each node, from the leaves up
    sizes: list[Ints] = []
    for level in reversed(levels):
        size = np.ones(len(level.tree), np.int64)
        if level.is_operator.any():
            size[level.is_operator] += brackets + np.add.reduceat(sizes[-1], first_children(level))
        sizes.append(size)
    rows = np.zeros((trees, length), np.uint8)
    places = np.zeros(trees, np.int64)
    for number, (level, size) in enumerate(zip(levels, reversed(sizes), strict=True)):
        operators = level.is_operator
        rows[level.tree, places] = level.code + np.where(operators, FIRST_OPERATOR, FIRST_DIGIT)
        if brackets:
            rows[level.tree[operators], (places + size - 1)[operators]] = CLOSE
        if not operators.any():
            break
        child_sizes = sizes[len(levels) - 2 - number]
        before = np.cumsum(child_sizes) - child_sizes
        counts = level.arguments[operators]
        # a child stands after its operator and its elder siblings
        places = np.repeat(places[operators] + 1 - before[first_children(level)], counts) + before
    return rows
