"""Small trained models on images whose evidence has a known place: explanations are judged on them, and token filters."""

from .explanations import explanation_rows, study_explanations
from .filtering import draw_filtering, filtering_rows, study_filtering

__all__ = ["draw_filtering", "explanation_rows", "filtering_rows", "study_explanations", "study_filtering"]
