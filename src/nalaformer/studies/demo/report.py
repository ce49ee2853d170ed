"""One table for the terminal, one page for the browser."""

import base64
import html
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...bench import describe_machine
from .study import DemoResult, Finding

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    ("attention", "With convolutions and positions inside attention off, its own norm and gate on."),
    ("accuracy", "On full grids at the end: mean over seeds, lowest to highest in brackets."),
    ("answer", "Mean weight that the best head of the marked cell puts on the answer's cell."),
    ("rho", "Rank correlation of query norm and attention entropy in the trained network; 0 below 0.02 nats."),
    ("train/s", "Images per second in training steps (forward and backward)."),
    ("large/s", "Images per second in inference with 4,096 tokens each."),
    ("MiB", "Peak memory of that."),
)


HOW_TO_READ = (
    "answer: weight of the marked cell's best head on the answer; rho: rank correlation of query norm and attention entropy; "
    "train/s: images per second of training steps; large/s, MiB: the same and peak memory of inference with 4,096 tokens. "
    "NaLa's shell: its LayerNorm and gate around a plain ReLU map. In brackets: lowest and highest seed."
)


def cells(finding: Finding) -> tuple[str, ...]:
    accuracies, cost = finding.accuracies, finding.cost

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        finding.entry.label,
        f"{finding.accuracy:.2f} ({min(accuracies):.2f}-{max(accuracies):.2f})",
        f"{finding.diagnosis.weight_on_answer:.2f}",
        # no minus in front of a rounded zero
        f"{round(finding.diagnosis.correlation, 2) + 0.0:.2f}",
        number(cost.training_images_per_second, ".0f"),
        number(cost.large_images_per_second, ".1f"),
        number(cost.large_mib, ".0f"),
    )


def title(result: DemoResult) -> str:
    seeds = len(result.found[0].accuracies)
    return f"cue grid, {result.steps} steps of {result.batch_size} images, {seeds} seeds, chance {result.chance:.2f}"


def demo_table(result: DemoResult) -> "Table":
    from rich.table import Table

    table = Table(title=title(result), title_justify="left")
    for name, _ in COLUMNS:
        table.add_column(name, justify="left" if name in ("attention", "accuracy") else "right")
    for finding in result.found:
        table.add_row(*cells(finding))
    return table


def write_report(result: DemoResult, path: Path) -> Path:
    """A page that needs nothing beside itself: the pictures are inside."""
    from .pictures import attention_maps, entropy_against_norm, learning_curves

    machine = describe_machine()
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(finding)) + "</tr>" for finding in result.found
    )
    head = "".join(f'<th title="{html.escape(meaning)}">{html.escape(name)}</th>' for name, meaning in COLUMNS)
    legend = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(meaning)}</dd>" for name, meaning in COLUMNS[1:])
    parts = {
        "title": html.escape(title(result)),
        "table": f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
        "findings": "".join(f"<p>{html.escape(line)}</p>" for line in result.findings()),
        "legend": f"<dl>{legend}</dl>",
        "curves": image(learning_curves(result), "accuracy against steps"),
        "entropy": image(entropy_against_norm(result), "entropy against query norm"),
        "maps": image(attention_maps(result), "attention maps of samples"),
        "parameters": ", ".join(f"{finding.entry.label} {finding.parameters:,}" for finding in result.found),
        "machine": html.escape(
            f"{machine.cpu}, {torch.get_num_threads()} threads, torch {machine.torch}, commit {machine.commit}, "
            f"{result.seconds:.0f} s in all"
        ),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.format(**parts))
    return path


def image(png: bytes, words: str) -> str:
    return f'<img alt="{html.escape(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>nalaformer demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left; }}
img {{ max-width: 100%; }} dt {{ font-weight: 600; }} dd {{ margin: 0 0 .4rem 1rem; }} small {{ color: #666; }}
</style></head><body>
<h1>Who finds the cell of that colour?</h1>
<p>Each image is a grid of coloured glyphs. One cell has a white frame and shows nothing but a colour: name the glyph that has
this colour. Every glyph comes equally often, so only comparing the marked cell with all others helps, and only sharp attention
reads a single one of them. The same two-block network was trained with each attention: {title}.</p>
{table}
{findings}
<h2>Learning curves</h2>{curves}
<h2>Does attention sharpen with the query?</h2>{entropy}
<h2>Where the marked cell looks</h2>
<p>Brighter is more weight, by the head that finds the answer best over the first 64 eval images, from the best seed; the
answer's cell is framed. Each map has its own scale.</p>{maps}
<h2>Columns</h2>{legend}
<p><small>Parameters: {parameters}. Figures of one small task on a small budget, measured on {machine}. They say
nothing about ImageNet.</small></p>
</body></html>
"""
