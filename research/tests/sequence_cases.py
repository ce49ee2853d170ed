"""Options with which every kind of sequence data is small."""

from research.sequences import SEQUENCES

# small, with sizes that divide nothing
CASES = {
    "listops": {"shortest": 10, "longest": 73, "max_depth": 5},
    "listops_sky": {"shortest": 10, "longest": 73, "max_depth": 5},
    "pathfinder": {"size": 19, "contour": 4, "distractors": 2, "distractor_length": 3, "seed_distance": 5},
    "pathx": {"size": 61, "contour": 4, "distractors": 2, "seed_distance": 11},
    "mqar": {"vocabulary": 67, "mixture": [[22, 3], [34, 5], [22, 3]]},
    "pointing": {"keys": 23, "probes": 5, "dimensions": 3},
    "pointing_control": {"keys": 61, "probes": 5, "dimensions": 3},
    "majority": {"keys": 23, "probes": 5, "dimensions": 3},
    "cue_cells": {"cells": 5, "cell_size": 9},
    "softmax_teacher": {"tokens": 11, "heads": 3, "size": 5},
    "copying": {"length": 26, "vocabulary": 11},
    "induction": {"length": 27, "vocabulary": 11},
    "recall_language": {"length": 131, "needles": 9, "fewest_needles": 2, "names": 31, "values": 17, "words": 13},
    "needles": {"length": 131, "needles": 9, "names": 31, "values": 17, "words": 13},
    "variables": {"length": 131, "needles": 9, "names": 31, "values": 17, "words": 13},
}


def make(name, samples=40, split="train", seed=0, **options):
    return SEQUENCES[name](split=split, samples=samples, seed=seed, **(CASES.get(name, {}) | options))
