"""Commands: `analyze` writes the page into a folder, with its plots as PNG and SVG beside it; `explore` serves the page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...atomic_files import write_atomically
from ...machine import describe_machine
from .look import Look
from .maps import ACCURACY, compute_maps, encode_maps, fit_layers
from .page import ModelOnPage, Page
from .plots import as_inline_svg, draw_curves, draw_depth, draw_maps, save_png_and_svg
from .server import Explorer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Advance = Callable[[str], None]
PAGE_NAME = "index.html"
STORED_ACCURACY = (
    f"Weights on this page are stored in a byte each, within {100 * ACCURACY:.1f}% of the largest weight of their map; "
    "entropies are those of the exact rows. Where a layer has more patches than the page has room for, the patch in the middle "
    "of a part of the image answers for that part, and a cell of a map sums the weights of its tokens. `nalaformer explore` "
    "computes every patch exactly."
)
LIVE_ACCURACY = "Weights are computed exactly for every patch that you choose, by the process that serves this page."


def write_report(looks: Sequence[Look], out: Path, *, advance: Advance = lambda _: None) -> list[Path]:
    """Write index.html and the plots beside it; return all files, the page first."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE_NAME
    write_atomically(path, stored_page(looks, advance=advance).text().encode())
    files = [path, *save_png_and_svg(depth_figure(looks), out / "entropy_by_layer")]
    for number, look in enumerate(looks):
        # two models of the same name differ only in their order
        end = "" if number == 0 else "_beside"
        title = f"Does attention sharpen as the query grows? {look.subject.name}"
        files += save_png_and_svg(draw_curves(look.curves(), title), out / f"entropy_against_norm{end}")
        maps = draw_maps(look.first, look.preview(), f"Where the middle patch looks: {look.subject.name}")
        files += save_png_and_svg(maps, out / f"maps{end}")
    return files


def stored_page(looks: Sequence[Look], *, advance: Advance = lambda _: None) -> Page:
    """Build the page with its maps inside, quantized."""
    images = len(looks[0].images)
    layers = iter(fit_layers([layer for look in looks for layer in look.layers], images=images))
    models = []
    for look in looks:
        described: list[dict[str, Any]] = []
        for found in look.records:
            layer = next(layers)
            queries = layer.stored_queries()
            rows = [encode_maps(compute_maps(found, layer, queries, image=image)) for image in range(images)]
            described.append(layer.describe() | {"rows": rows})
            advance(layer.name)
        models.append(look.on_page(described))
    return build_page(looks, models, accuracy=STORED_ACCURACY, is_live=False)


def explorer_of(looks: Sequence[Look]) -> Explorer:
    """Build the server's content: the page without maps, which are computed on request."""
    models = [look.on_page([layer.describe() for layer in look.layers]) for look in looks]
    page = build_page(looks, models, accuracy=LIVE_ACCURACY, is_live=True)
    return Explorer(looks, page.text())


def build_page(looks: Sequence[Look], models: Sequence[ModelOnPage], *, accuracy: str, is_live: bool) -> Page:
    machine, count = describe_machine(), len(looks[0].images)
    heads = sum(layer.heads for look in looks for layer in look.layers)
    names = ", ".join(image["name"] for image in looks[0].images)
    return Page(
        models=models,
        lead=f"{sum(len(look.layers) for look in looks)} attention layers, {heads} heads, figures over {count} image"
        f"{'s' if count > 1 else ''}: {names}.",
        accuracy=accuracy,
        is_live=is_live,
        start=sharpest_layer(looks),
        depth_figure=as_inline_svg(depth_figure(looks), "Entropy of attention by layer"),
        footer=[f"torch {machine.torch}, commit {machine.commit}."],
    )


def depth_figure(looks: Sequence[Look]) -> "Figure":
    return draw_depth([(look.subject.name, look.relative_entropy()) for look in looks])


def sharpest_layer(looks: Sequence[Look]) -> int:
    """Return the initial place of the slider: at the depth of the layer with the lowest entropy in the first model."""
    means = [sum(heads) / len(heads) for heads in looks[0].relative_entropy()]
    deepest = max(len(look.layers) for look in looks) - 1
    return round(means.index(min(means)) * deepest / max(1, len(means) - 1))
