"""Accuracy against speed of models that drop tokens, by attention and at random, without training and fine-tuned.

python -m research.evidence filtering benchmarks/training/token_filtering_cpu.csv
"""

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runner import Say, say_on_stdout
from nalaformer.charts import save_figure
from nalaformer.conversion import filter_tokens

from .glyph_pair import GlyphPair, make_pyramid, make_vit, pair_accuracy, pair_batch, pair_loss, train, write_rows

SHARES = (1.0, 0.5, 0.25, 0.1)
# tokens are dropped before the second block of the ViTs, and before the coarse stage of the pyramid
PLACE = 1
COLUMNS = ("model", "seed", "by", "fine_tuned", "share", "accuracy", "images_per_second", "images", "steps", "tuning_steps")


def study_filtering(
    out: Path, *, steps: int = 250, tuning_steps: int = 30, images: int = 256, seed: int = 0, say: Say = say_on_stdout
) -> list[dict[str, object]]:
    """Train, filter, measure; writes the rows and, beside them, the curves as PNG and SVG."""
    measured = filtering_rows(seed=seed, steps=steps, tuning_steps=tuning_steps, images=images)
    rows = write_rows(out, COLUMNS, measured, say)
    for ending in (".png", ".svg"):
        draw_filtering(rows, out.with_suffix(ending))
    return rows


def filtering_rows(*, seed: int, steps: int, tuning_steps: int, images: int) -> Iterator[dict[str, object]]:
    """A row for each model, rule, share and way of training."""
    batch_of = partial(pair_batch, GlyphPair(split="train", samples=2**31, seed=seed))
    shown, kinds, _ = pair_batch(GlyphPair(split="val", samples=images, seed=seed), range(images))
    networks = {
        "vit softmax": partial(make_vit, patch_size=4, depth=3),
        "pyramid nalaformer": partial(make_pyramid, embed_dims=(16, 96), depths=(1, 4)),
        "vit nalaformer": partial(make_vit, patch_size=4, depth=3),
    }
    for name, make in networks.items():
        torch.manual_seed(seed)
        model = train(make(name.split()[1]), batch_of, pair_loss, steps=steps)
        for by in ("attention", "random"):
            for share in SHARES:
                for tuned in (0, tuning_steps):
                    if share == 1 and (by == "random" or tuned):
                        continue
                    tested = copy.deepcopy(model)
                    torch.manual_seed(seed)
                    filter_tokens(tested, {PLACE: share}, by=by)
                    if tuned:
                        train(tested, batch_of, pair_loss, steps=tuned, learning_rate=5e-4, first=10**8)
                    yield {
                        "model": name,
                        "seed": seed,
                        "by": by,
                        "fine_tuned": int(tuned > 0),
                        "share": share,
                        "accuracy": round(pair_accuracy(tested, shown, kinds), 4),
                        "images_per_second": round(images_per_second(tested, shown), 1),
                        "images": images,
                        "steps": steps,
                        "tuning_steps": tuned,
                    }


@torch.no_grad()
def images_per_second(model: nn.Module, images: Tensor, *, batch: int = 64, repeats: int = 9) -> float:
    """The rate of one core, by the processor time of this process: other work on the machine does not count."""
    images = images[:batch]
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        model(images)
        seconds.append(time.process_time() - start)
    return len(images) / statistics.median(seconds[1:])


def draw_filtering(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Accuracy against images per second, a panel per model; solid by attention, dashed at random, filled if fine-tuned."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    figure = Figure(figsize=(4 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for by, colour, dashes in (("attention", "#0072B2", "-"), ("random", "#D55E00", "--")):
            for tuned in (0, 1):
                points = [row for row in rows if row["model"] == name and row["by"] == by and row["fine_tuned"] == tuned]
                points = [row for row in rows if row["model"] == name and row["share"] == 1.0] + points
                points = sorted({row["share"]: row for row in points}.values(), key=lambda row: -row["share"])
                panel.plot(
                    [row["images_per_second"] for row in points],
                    [row["accuracy"] for row in points],
                    dashes,
                    color=colour,
                    marker="o",
                    markerfacecolor=colour if tuned else "white",
                    label=f"{by}, {'fine-tuned' if tuned else 'no training'}",
                )
                for row in points if by == "attention" and tuned else ():
                    place = (row["images_per_second"], row["accuracy"])
                    panel.annotate(f"{row['share']:.0%}", place, textcoords="offset points", xytext=(0, 6), fontsize=7)
        panel.set_title(name)
        panel.set_xlabel("images per second of one core")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("both glyphs named")
    panels[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=110)
    return path
