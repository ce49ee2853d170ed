"""One self-contained HTML page with style, script, plots and maps inside."""

import base64
import hashlib
import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ... import __version__

if TYPE_CHECKING:
    from PIL.Image import Image

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Column:
    """A statistic of every head of every layer."""

    name: str
    meaning: str
    heads: Sequence[Sequence[float]]
    """A value for each head of each layer; NaN for none."""


@dataclass(frozen=True, kw_only=True)
class ModelOnPage:
    """The content of the page about one model."""

    name: str
    notes: Sequence[str]
    is_random: bool
    images: Sequence[dict[str, Any]]
    """The name, image (a data URL) and answer of each."""
    layers: Sequence[dict[str, Any]]
    """The layers as in `Layer.describe`, with rows for each image if the page holds them."""
    columns: Sequence[Column] = ()
    figures: Sequence[str] = ()
    """SVG elements, one for each layer."""
    explanations: Sequence[str] = ()
    """Figure elements, those of an image side by side."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of the page."""

    models: Sequence[ModelOnPage]
    lead: str
    accuracy: str
    is_live: bool = False
    """True if the page requests maps from its server."""
    start: int = 0
    """The initial place of the slider."""
    depth_figure: str = ""
    footer: Sequence[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the HTML document. All text from users is escaped."""
        script, style = (HERE / "page.js").read_text(), (HERE / "page.css").read_text()
        heading = " beside ".join(model.name for model in self.models)
        return Template((HERE / "page.html").read_text()).substitute(
            policy=policy(script, is_live=self.is_live),
            title=html.escape(f"See inside {heading}"),
            style=style,
            heading=html.escape(heading),
            lead=html.escape(self.lead),
            notes="".join(notes_html(model) for model in self.models),
            accuracy=html.escape(self.accuracy),
            figures=explanations_html(self) + plots_html(self),
            tables="".join(table_html(model, number) for number, model in enumerate(self.models) if model.columns),
            footer=html.escape(" ".join([f"Made by nalaformer {__version__}.", *self.footer])),
            data=as_script_data(
                {"live": self.is_live, "start": self.start, "models": [model_data(model) for model in self.models]}
            ),
            script=script,
        )


def policy(script: str, *, is_live: bool) -> str:
    """Return the content security policy: the browser may run this one script, show embedded images, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "connect-src 'self'; " if is_live else ""
    return (
        f"default-src 'none'; {connect}script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def as_script_data(value: Any) -> str:
    """Return JSON that cannot end its script element, whatever text it holds."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def model_data(model: ModelOnPage) -> dict[str, Any]:
    return {"name": model.name, "images": list(model.images), "layers": list(model.layers)}


def notes_html(model: ModelOnPage) -> str:
    name, words = html.escape(model.name), html.escape("; ".join(model.notes))
    if model.is_random:
        return f'<p class="warning" role="note"><strong>⚠ Random weights: {name}</strong> {words}.</p>'
    return f'<p class="facts"><b>{name}</b>: {words}.</p>' if words else ""


def explanations_html(page: Page) -> str:
    """Return the section of explanations; empty if no model has classes."""
    if not any(model.explanations for model in page.models):
        return ""
    parts = [
        '<section id="explained"><h2>What does the answer rest on?</h2>',
        '<p class="hint">Each map sums to 100% over the image, and bright places count most. Rollout follows attention from '
        "the last layer to the first, whatever the class; decision-aware counts what attention brings to the class that the "
        "model names.</p>",
    ]
    for model in page.models:
        if len(page.models) > 1:
            parts.append(f"<h3>{html.escape(model.name)}</h3>")
        parts.append(f'<div class="plots">{"".join(model.explanations)}</div>')
    return "".join(parts) + "</section>"


def plots_html(page: Page) -> str:
    if not page.depth_figure:
        return ""
    parts = [
        '<section id="figures"><h2>How sharply does it look?</h2>',
        '<p class="hint">Entropy is low where a query looks at few tokens and highest where it looks at all of them alike. A '
        "mark stands for a head, the line for their mean.</p>",
        f'<div class="plot wide" tabindex="0" role="region" aria-label="Entropy by layer">{page.depth_figure}</div>',
        "<h2>Does attention sharpen as the query grows?</h2>",
        '<p class="hint">Queries in order of their norm, in parts of equal size; a line for each head, its number at the end. '
        "A line that falls means: the longer the query, the sharper its attention.</p>",
    ]
    for model in page.models:
        if len(page.models) > 1:
            parts.append(f"<h3>{html.escape(model.name)}</h3>")
        parts.append(
            '<div class="plots">' + "".join(f'<div class="plot">{figure}</div>' for figure in model.figures) + "</div>"
        )
    return "".join(parts) + "</section>"


def table_html(model: ModelOnPage, number: int) -> str:
    """Return a table with a row for each layer: the mean of its heads, then lowest and highest, and a table of all heads."""
    names = [column.name for column in model.columns]
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("layer", "attention", "tokens", "heads", *names))
    rows, details = [], []
    for place, layer in enumerate(model.layers):
        facts = (layer["name"], layer["kind"], layer["keys"], layer["heads"])
        cells = [table_cell(column.heads[place]) for column in model.columns]
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(fact))}</td>" for fact in facts) + "".join(cells) + "</tr>")
        for index in range(layer["heads"]):
            values = "".join(f"<td>{format_number(column.heads[place][index])}</td>" for column in model.columns)
            details.append(f"<tr><td>{html.escape(layer['name'])}</td><td>head {index + 1}</td>{values}</tr>")
    legend = "".join(f"<dt>{html.escape(column.name)}</dt><dd>{html.escape(column.meaning)}</dd>" for column in model.columns)
    title = f"table-{number}"
    inner = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("layer", "head", *names))
    return (
        f'<section aria-labelledby="{title}"><h2 id="{title}">Layer by layer: {html.escape(model.name)}</h2>'
        '<p class="small">The mean over the heads; below it the lowest and the highest head.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><dl>{legend}</dl>"
        f'<details><summary>Every head</summary><div class="scroll" tabindex="0" role="region" aria-label="Every head">'
        f"<table><thead><tr>{inner}</tr></thead><tbody>{''.join(details)}</tbody></table></div></details></section>"
    )


def table_cell(values: Sequence[float]) -> str:
    known = [value for value in values if value == value]
    if not known:
        return "<td>-</td>"
    mean = sum(known) / len(known)
    spread = f"<small>{format_number(min(known))} to {format_number(max(known))}</small>" if len(known) > 1 else ""
    return f"<td>{format_number(mean)}{spread}</td>"


def format_number(value: float) -> str:
    if value != value:
        return "-"
    # avoid a minus before a rounded zero
    return f"{value:.3g}" if abs(value) >= 5e-4 or value == 0 else f"{value:.1e}"


def as_address(picture: "Image") -> str:
    """Return the image as a data URL: small ones as PNG, photographs as JPEG."""
    buffer = io.BytesIO()
    is_small = max(picture.size) <= 128
    picture.save(buffer, **({"format": "PNG"} if is_small else {"format": "JPEG", "quality": 90}))
    kind = "png" if is_small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
