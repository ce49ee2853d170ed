"""`python -m research.evidence explanations|filtering FILE.csv`."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from . import study_explanations, study_filtering

STUDIES: dict[str, Callable[[Path], object]] = {"explanations": study_explanations, "filtering": study_filtering}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in STUDIES:
        sys.exit(f"usage: python -m research.evidence {'|'.join(STUDIES)} FILE.csv")
    torch.set_num_threads(1)
    STUDIES[sys.argv[1]](Path(sys.argv[2]))
