"""One table for the terminal, one page for the browser."""

import base64
import html
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nalaformer.atomic_files import write_atomically
from nalaformer.machine import describe_machine

from .cost import TOKENS
from .entries import OURS, TASKS
from .intervals import mean_interval
from .study import DemoResult, Finding

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    (
        "attention",
        "The feature map, in ours with a learned contrast; norm, gate, convolutions and positions inside attention are off.",
    ),
    ("pointing", "Accuracy on held-out sequences at the end: mean over seeds, and the 95% interval of the mean."),
    ("majority", "The same of the task that needs flat attention."),
    (
        "nearest",
        "Mean weight that the best head of a probe puts on the nearest of 32 keys, of ours before the contrast.",
    ),
    ("sharper", "Nats of entropy that attention loses when queries grow from half to twice their norm."),
    (
        f"ms at {TOKENS[-1] // 1024}K",
        f"One core's time for one sequence of {TOKENS[-1]:,} tokens through the network, in inference.",
    ),
)
HOW_TO_READ = (
    "pointing, majority: accuracy, mean over seeds ± 95% interval; nearest: weight on the nearest of 32 keys; sharper: entropy "
    f"that attention loses when queries double twice, in nats; ms: one core's time for {TOKENS[-1]:,} tokens."
)


def cells(finding: Finding) -> tuple[str, ...]:
    return (
        finding.entry.label,
        *(with_interval(finding.accuracies[task.name]) for task in TASKS),
        f"{finding.diagnosis.mean_by_nearness[0].item():.2f}",
        # no minus in front of a rounded zero
        f"{round(finding.diagnosis.sharpening, 2) + 0.0:.2f}",
        f"{finding.milliseconds[-1]:,.0f}",
    )


def with_interval(values: tuple[float, ...]) -> str:
    interval = mean_interval(values)
    return f"{interval.middle:.2f}" + (f" ± {interval.half:.2f}" if math.isfinite(interval.half) else "")


def title(result: DemoResult) -> str:
    steps = " and ".join(f"{result.steps[task.name]}" for task in TASKS)
    chance = " and ".join(f"{result.chance[task.name]:.3g}" for task in TASKS)
    return f"{steps} steps of {result.batch_size} sequences, {result.seeds} seeds, chance {chance}"


def demo_table(result: DemoResult) -> "Table":
    from rich.table import Table

    table = Table(title=title(result), title_justify="left")
    for name, _ in COLUMNS:
        # a terminal of 80 columns has room for the results if a long name takes two lines
        is_name = name == "attention"
        table.add_column(name, justify="left" if is_name else "right", no_wrap=not is_name, min_width=13 if is_name else None)
    for finding in result.found:
        table.add_row(*cells(finding), style="bold" if finding.entry == OURS else None)
    return table


def write_report(result: DemoResult, path: Path) -> Path:
    """Write a self-contained page: the plots are embedded, and lie beside it as PNG and SVG files for other uses."""
    from .pictures import PICTURES, write_plot

    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = {
        name: image(write_plot(draw(result), path.parent, name), name.replace("_", " ")) for name, draw in PICTURES.items()
    }
    machine = describe_machine()
    rows = "\n".join(
        ('<tr class="ours">' if finding.entry == OURS else "<tr>")
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(finding))
        + "</tr>"
        for finding in result.found
    )
    advice = result.advice() if result.ours_is_recommended else ""
    head = "".join(f'<th title="{html.escape(meaning)}">{html.escape(name)}</th>' for name, meaning in COLUMNS)
    legend = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(meaning)}</dd>" for name, meaning in COLUMNS[1:])
    parts = {
        "title": html.escape(title(result)),
        "table": f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
        "advice": f'<p class="advice">{html.escape(advice)} {HOW_TO_USE_OURS}</p>' if advice else "",
        "findings": "".join(f"<li>{html.escape(line)}</li>" for line in result.findings() if line != advice),
        "legend": f"<dl>{legend}</dl>",
        "parameters": ", ".join(
            f"{html.escape(finding.entry.label)} {finding.diagnosis.parameters:,}" for finding in result.found
        ),
        "machine": html.escape(
            f"{machine.cpu}, {torch.get_num_threads()} threads, torch {machine.torch}, commit {machine.commit}, "
            f"{result.seconds:.0f} s in all"
        ),
        **pictures,
    }
    write_atomically(path, PAGE.format(**parts).encode())
    return path


def image(png: bytes, words: str) -> str:
    return f'<img alt="{html.escape(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


HOW_TO_USE_OURS = (
    'In Python: <code>nalaformer.attention.build("linear", dim=..., num_heads=..., feature_map="channel_softmax", '
    'contrast="learned", contrast_offset=-0.75)</code>. With six seeds Hedgehog points better by up to 0.02 '
    "(docs/training.md); what speaks for ours is recall of many pairs, which this page does not measure (docs/scoreboard.md, "
    "three seeds)."
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>nalaformer demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }} .ours {{ background: #f5eefa; font-weight: 600; }}
.advice {{ background: #f5eefa; border-left: 4px solid #7b1fa2; padding: .5rem .8rem; }}
td {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
img {{ max-width: 100%; }} dt {{ font-weight: 600; }} dd {{ margin: 0 0 .4rem 1rem; }} small {{ color: #666; }}
</style></head><body>
<h1>Which attention can point?</h1>
<p>A sequence holds 32 keys: a direction and a class each. A probe shows a direction near one of them; the answer is the class
of the nearest key. Only attention that singles out one of 32 tokens can give it, and accuracy grows with how sharp attention
can be. The majority is the opposite: which class do most keys have? There all weights should be alike. The same two-block
network is trained with each attention, and the feature map is all that differs, with a learned contrast in the map of our
own: {title}.</p>
{table}
{advice}
<h2>What the results support</h2><ul>{findings}</ul>
<h2>Scores</h2>{scores}
<p>A dot for each seed, a bar for the 95% interval of the mean.</p>
<h2>Does attention sharpen with the query?</h2>{entropy_against_norm}
<p>Left: every query of the trained networks is made shorter and longer, and nothing else changes. With ReLU-like maps the
length cancels and the line is flat; softmax sharpens as the query grows. The norm-aware map can sharpen at short queries alone:
at long ones its power has reached its end. Right: the queries as the networks make them. There directions differ too, so a line
may fall without any effect of the norm itself. Here and below, ours is shown by the weights of its map, before the contrast.
The contrast takes the same off the weight of every key, which may then be negative, and signed weights have no entropy.</p>
<h2>Where probes look</h2>{attention_maps}
<p>Each row is a probe of the same sequence, its 32 keys ordered from the nearest to the farthest, by the head that finds the
nearest best. A sharp method has one bright column at the left.</p>
<h2>How they learn</h2>{learning_curves}
<h2>What it costs</h2>{cost_against_tokens}
<p>One sequence through the same network in inference, float32: processor time of one core of this machine, which other
programs hardly change; the shorter of two rounds.</p>
<h2>Columns</h2>{legend}
<p><small>Parameters: {parameters}. Results on two small tasks with a small budget, measured on {machine}. They say
nothing about ImageNet.</small></p>
</body></html>
"""
