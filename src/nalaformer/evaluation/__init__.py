"""How good models are. Language: perplexity over a text, and lm-eval's tasks on local files; `images`: figures of samples."""

from .harness import HARNESS_TASKS, HarnessResult, evaluate_tasks
from .loading import LanguageModel, load_language_model
from .perplexity import TextScore, score_text, token_losses

__all__ = [
    "HARNESS_TASKS",
    "HarnessResult",
    "LanguageModel",
    "TextScore",
    "evaluate_tasks",
    "load_language_model",
    "score_text",
    "token_losses",
]
