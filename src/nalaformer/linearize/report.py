"""A page about a conversion: what is left of the model, stage by stage and layer by layer."""

import html
from pathlib import Path
from typing import Any

from ..atomic_files import write_atomically
from ..charts import new_figure, save_figure
from .run import Linearized

COLUMNS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "divergence": "KL to the teacher",
    "agreement": "same likeliest token",
    "accuracy": "accuracy",
}


def rows_of(result: Linearized) -> list[tuple[str, list[str]]]:
    """The teacher, then each stage."""
    first = next(iter(result.validations.values()))
    teacher = [first.teacher_loss, first.teacher_perplexity, 0.0, 1.0, first.teacher_accuracy]
    rows = [("teacher (softmax)", teacher)]
    for stage, validation in result.validations.items():
        figures = validation.figures()
        rows.append((f"after {stage}", [figures[name] for name in COLUMNS]))
    return [(name, [f"{value:.4g}" for value in values]) for name, values in rows]


def draw_errors(result: Linearized, path: Path) -> Path:
    """A bar for each layer: the squared error of its head outputs, as a part of their square."""
    figure = new_figure(7, 3, dpi=120)
    axes: Any = figure.subplots()
    errors = list(result.transfer_errors.values())
    axes.bar(range(len(errors)), errors, color="#33658a")
    # a layer has a whole number
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("error / square of the outputs")
    axes.set_title("attention transfer")
    save_figure(figure, path)
    return path


def results_table(result: Linearized) -> list[str]:
    """Return the lines of a Markdown table: the teacher, then each stage."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    return lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows_of(result)]


def markdown(result: Linearized) -> str:
    lines = ["# Linearization", "", *results_table(result)]
    if result.transfer_errors:
        lines += ["", "| layer | error of its outputs |", "|---|---|"]
        lines += [f"| {name.removeprefix('layer_')} | {error:.4g} |" for name, error in result.transfer_errors.items()]
    lines += ["", f"Attention: `{result.config.attention}`", ""]
    return "\n".join(lines)


def write_report(result: Linearized, folder: str | Path) -> Path:
    """report.md, report.html and transfer.png in the folder; the path of the page."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.md", markdown(result).encode())
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *COLUMNS.values()))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in (name, *cells)) + "</tr>"
        for name, cells in rows_of(result)
    )
    picture = ""
    if result.transfer_errors:
        draw_errors(result, folder / "transfer.png")
        picture = '<p><img src="transfer.png" alt="error of each layer"></p>'
    style = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.3em .8em;border-bottom:1px solid #ccc}"
    page = folder / "report.html"
    text = (
        f"<!doctype html><meta charset=utf-8><title>Linearization</title><style>{style}</style><h1>Linearization</h1>"
        f"<table><tr>{head}</tr>{body}</table>{picture}<p>{html.escape(str(result.config.attention))}</p>\n"
    )
    write_atomically(page, text.encode())
    return page
