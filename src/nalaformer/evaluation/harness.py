"""lm-eval on local files: our task files, your .jsonl files, no network."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry import unknown_name
from .loading import LanguageModel

TASK_FILES = Path(__file__).with_name("harness_tasks")

# task -> fields of a row of its file <task>.jsonl; the names are those of the published data
HARNESS_TASKS: dict[str, tuple[str, ...]] = {
    "piqa": ("goal", "sol1", "sol2", "label"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "winogrande": ("sentence", "option1", "option2", "answer"),
    "arc_easy": ("question", "choices", "answerKey"),
    "arc_challenge": ("question", "choices", "answerKey"),
    "lambada": ("text",),
    "wikitext": ("page",),
}


# what else a row must be, and the words for it
FORMS: dict[str, tuple[Callable[[dict[str, Any]], bool], str]] = {
    "piqa": (lambda row: str(row["label"]) in ("0", "1"), "a label 0 or 1"),
    "hellaswag": (
        lambda row: isinstance(row["endings"], list) and 0 <= int(row["label"]) < len(row["endings"]),
        "a list of endings, and as label the number of one of them, from 0",
    ),
    "winogrande": (
        lambda row: "_" in row["sentence"] and str(row["answer"]) in ("1", "2"),
        'a sentence with a gap "_", and an answer 1 or 2',
    ),
}
FORMS["arc_easy"] = FORMS["arc_challenge"] = (
    lambda row: row["answerKey"] in row["choices"]["label"] and len(row["choices"]["label"]) == len(row["choices"]["text"]),
    'choices {"text": [...], "label": [...]} of one length, and as answerKey one of the labels',
)


@dataclass(frozen=True, kw_only=True)
class HarnessResult:
    """One figure of one task."""

    task: str
    metric: str
    value: float
    error: float | None
    """Standard error, where the harness gives one."""
    samples: int


def evaluate_tasks(
    language_model: LanguageModel,
    tasks: Sequence[str],
    data: str | Path,
    *,
    limit: int | None = None,
    shots: int = 0,
    window: int | None = None,
    batch_size: int = 8,
) -> list[HarnessResult]:
    """Run tasks of HARNESS_TASKS on the files <task>.jsonl of a folder.

    limit: rows of each task, for a quick look. shots: solved examples before each question, drawn from the same file.
    window: tokens that the model sees at once; None: the length that its config names.
    """
    files = {task: checked_file(task, Path(data)) for task in tasks}
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be positive, got {limit}")
    if window is not None:
        from ..models.language.lengths import length_note

        length_note(language_model.model, window)
    with offline(), tempfile.TemporaryDirectory() as aside:
        # after the switch above: these packages read it when they are imported
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        write_task_files(files, Path(aside))
        model = HFLM(
            pretrained=language_model.model,
            tokenizer=language_model.tokenizer,
            backend="causal",
            max_length=window,
            batch_size=batch_size,
        )
        found: Any = _evaluate(
            simple_evaluate,
            model=model,
            tasks=list(files),
            task_manager=TaskManager(include_path=aside, include_defaults=False),
            num_fewshot=shots or None,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return [result for task in tasks for result in results_of(task, found)]


def _evaluate(run: Any, **arguments: Any) -> Any:
    try:
        return run(**arguments)
    except AssertionError as error:
        # how lm-eval says that an answer does not fit
        raise ValueError(
            "every answer must fit into the model's window, got one that does not; give a larger --window, or leave the row out"
        ) from error


def write_task_files(files: dict[str, Path], folder: Path) -> None:
    """Our task files with the place of the data filled in; the copy of the rows that `datasets` makes stays beside them."""
    for task, file in files.items():
        settings = {
            "include": str(TASK_FILES / f"{task}.yaml"),
            "task": task,
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "rows")},
        }
        # JSON is YAML too
        (folder / f"{task}.yaml").write_text(json.dumps(settings))


def results_of(task: str, found: dict[str, Any]) -> Iterator[HarnessResult]:
    """The harness writes {"acc,none": 0.5, "acc_stderr,none": 0.1, ...}."""
    figures = found["results"][task]
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        error = figures.get(f"{metric}_stderr,{filtered}")
        yield HarnessResult(
            task=task,
            metric=metric,
            value=float(value),
            # "N/A" where there is none
            error=float(error) if isinstance(error, (int, float)) else None,
            samples=int(found["n-samples"][task]["effective"]),
        )


def checked_file(task: str, folder: Path) -> Path:
    """The task's file, every row of it read once: a benchmark with rows missing would be another benchmark."""
    if task not in HARNESS_TASKS:
        raise unknown_name("task", task, HARNESS_TASKS)
    file = folder / f"{task}.jsonl"
    if not file.is_file():
        raise ValueError(
            f"the task {task} reads {file}, got no such file; its rows need the fields {', '.join(HARNESS_TASKS[task])}, and "
            "docs/language-training.md says where they come from"
        )
    rows = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                missing = [name for name in HARNESS_TASKS[task] if name not in row]
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{file}:{number} must be a JSON object: {error}") from error
            if missing:
                raise ValueError(
                    f"{file}:{number} must have the fields {', '.join(HARNESS_TASKS[task])}, got none named {missing[0]!r}"
                )
            if task in FORMS and not has_form(task, row):
                raise ValueError(f"{file}:{number} must have {FORMS[task][1]}, got {json.dumps(row)[:200]}")
            rows += 1
    if not rows:
        raise ValueError(f"{file} must hold at least one row, got an empty file")
    return file.absolute()


def has_form(task: str, row: dict[str, Any]) -> bool:
    """Whether a row that has every field can be asked."""
    try:
        return FORMS[task][0](row)
    except (TypeError, ValueError, KeyError):
        return False


@contextmanager
def offline() -> Iterator[None]:
    """Keeps packages off the network inside the block, whether they are imported already or not."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    switched = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    for module, name, _ in switched:
        setattr(module, name, True)
    try:
        yield
    finally:
        for module, name, value in switched:
            setattr(module, name, value)
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
