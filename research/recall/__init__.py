"""What a converted model still knows of long texts, in percent of its softmax teacher."""

from .study import RecallStudy, run_recall, small_recall, toy_recall

__all__ = ["RecallStudy", "run_recall", "small_recall", "toy_recall"]
