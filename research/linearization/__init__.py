"""Study of converted softmax models: accuracy that remains, and the cost of prompts and decoding before and after."""

from .study import PARTS, SIZES, LinearizationStudy, Rows, run_linearization, small_study, toy_study

__all__ = ["PARTS", "SIZES", "LinearizationStudy", "Rows", "run_linearization", "small_study", "toy_study"]
