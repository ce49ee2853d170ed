"""Recall of converted models in long texts, in percent of their softmax teacher."""

from .study import RecallStudy, run_recall, small_recall, toy_recall

__all__ = ["RecallStudy", "run_recall", "small_recall", "toy_recall"]
