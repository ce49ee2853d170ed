"""What is left of a softmax model after its conversion, and what prompts and decoding cost before and after."""

from .study import PARTS, SIZES, LinearizationStudy, Rows, run_linearization, small_study, toy_study

__all__ = ["PARTS", "SIZES", "LinearizationStudy", "Rows", "run_linearization", "small_study", "toy_study"]
