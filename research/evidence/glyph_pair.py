"""Images with two glyphs among clutter, networks that name both, and their training."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmarks.runner import Say, today
from nalaformer.atomic_files import write_csv
from nalaformer.conversion import convert
from nalaformer.data.generated import Image
from nalaformer.data.glyph_grids import CueGrid, GlyphGrid, unit_vectors
from nalaformer.data.glyphs import NAMES
from nalaformer.machine import describe_machine
from nalaformer.models.vision.variants import build
from nalaformer.recipes.generated import small_vit

# columns of every row, beside what a study measures
MACHINE_COLUMNS = ("device", "torch", "commit", "date")
CELLS, CELL_SIZE, GLYPHS = 6, 8, 6
IMAGE_SIZE = CELLS * CELL_SIZE
# black, as the images have it: pixels minus one half
BLACK = -0.5


class GlyphPair(GlyphGrid):
    """Two glyphs of different kinds; of the other cells half are blank and the rest hold coloured noise.

    The evidence for a kind is the one cell that shows it. The label numbers the pairs of kinds.
    """

    def __init__(self, *, split: str, samples: int, seed: int = 0) -> None:
        super().__init__(split=split, samples=samples, seed=seed, cells=CELLS, cell_size=CELL_SIZE, glyphs=GLYPHS)
        self.pairs = [(a, b) for a in range(GLYPHS) for b in range(GLYPHS) if a < b]
        self.classes = tuple(f"{NAMES[a]} and {NAMES[b]}" for a, b in self.pairs)

    def draw(self, random: Generator) -> tuple[Image, int]:
        pixels, kinds, _ = self.arranged(random)
        return pixels, self.pairs.index((min(kinds), max(kinds)))

    def arranged(self, random: Generator) -> tuple[Image, tuple[int, int], tuple[int, int]]:
        """Pixels, the two kinds, and in which cells, counted row by row, they stand."""
        kinds = random.permutation(self.glyphs)[:2]
        clutter = self.cells**2 // 2 - 2
        noise = random.random((clutter, 1, self.cell_size, self.cell_size)) < 0.4
        colours = 0.5 + 0.5 * unit_vectors(random, clutter)
        patches = np.concatenate((self.painted(unit_vectors(random, 2), kinds), colours[:, :, None, None] * noise))
        pixels, places = self.place(random, patches.astype(np.float32))
        return pixels, (int(kinds[0]), int(kinds[1])), (int(places[0]), int(places[1]))


def pair_batch(data: GlyphPair, numbers: range) -> tuple[Tensor, Tensor, Tensor]:
    """Images [B, 3, H, W], the kinds [B, 2] in each, and their cells [B, 2]."""
    drawn = [data.arranged(data.random_of(number)) for number in numbers]
    images = torch.stack([torch.from_numpy(pixels - 0.5) for pixels, _, _ in drawn])
    return images, torch.tensor([kinds for _, kinds, _ in drawn]), torch.tensor([places for _, _, places in drawn])


def cue_batch(data: CueGrid, numbers: range) -> tuple[Tensor, Tensor, Tensor]:
    """Images, the label [B], and the cells [B, 2] of the cue and of the answer: without either there is no decision."""
    drawn = [data.arranged(data.random_of(number)) for number in numbers]
    images = torch.stack([torch.from_numpy(pixels - 0.5) for pixels, _, _ in drawn])
    return images, torch.tensor([label for _, label, _ in drawn]), torch.tensor([places for _, _, places in drawn])


def make_vit(attention: str, *, patch_size: int = CELL_SIZE, depth: int = 3) -> nn.Module:
    """A plain ViT of timm with a class token, with softmax or converted before it is trained."""
    model = VisionTransformer(
        img_size=IMAGE_SIZE, patch_size=patch_size, embed_dim=64, depth=depth, num_heads=4, mlp_ratio=2, num_classes=GLYPHS
    )
    return model if attention == "softmax" else convert(model, attention)


def make_pyramid(attention: str, *, embed_dims: tuple[int, int] = (24, 48), depths: tuple[int, int] = (1, 2)) -> nn.Module:
    """Our pyramid of two stages, the first linear and the second softmax."""
    return build(
        "nalaformer_xt",
        attention=attention,
        embed_dims=embed_dims,
        depths=depths,
        num_heads=(1, 2),
        mlp_ratios=2,
        attention_stages="lv",
        layer_scale=None,
        key_reduction=1,
        softmax_key_reduction=1,
        projection=None,
        img_size=IMAGE_SIZE,
        num_classes=GLYPHS,
        drop_path_rate=0.0,
    )


def make_cue_vit(attention: str, *, cells: int) -> nn.Module:
    """The network of the cue_grid recipe with three blocks: a token for each cell, the largest logit of all tokens counts."""
    options = small_vit(cells * CELL_SIZE) | {"depths": [3]}
    return build("vit_nala_tiny_patch16", attention=attention, num_classes=4, **options)


def write_rows(out: Path, columns: Sequence[str], rows: Iterable[dict[str, object]], say: Say) -> list[dict[str, object]]:
    """Say each row as it comes, and write the file anew with it."""
    facts = describe_machine().columns("cpu") | {"date": today()}
    found: list[dict[str, object]] = []
    for row in rows:
        found.append(row | facts)
        say(" ".join(f"{key}={value}" for key, value in row.items()))
        write_csv(out, (*columns, *MACHINE_COLUMNS), found)
    return found


def pair_loss(logits: Tensor, kinds: Tensor) -> Tensor:
    """Each kind by itself: is it in the image?"""
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits).scatter(1, kinds, 1.0))


def train(
    model: nn.Module,
    batch_of: Callable[[range], tuple[Tensor, Tensor, Tensor]],
    compute_loss: Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int,
    batch: int = 32,
    learning_rate: float = 2e-3,
    first: int = 0,
) -> nn.Module:
    """A short run on images `first` and following; the model in evaluation mode."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / max(1, steps // 10), 1.1 * (1 - step / steps))
        start = first + step * batch
        images, labels, _ = batch_of(range(start, start + batch))
        loss = compute_loss(model(images), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.eval()


@torch.no_grad()
def pair_accuracy(model: nn.Module, images: Tensor, kinds: Tensor) -> float:
    """Share of images whose two largest logits are the two kinds."""
    found = torch.cat([model(part) for part in images.split(64)]).topk(2).indices.sort(1).values
    return (found == kinds.sort(1).values).all(1).double().mean().item()
