"""`nalaformer generate ...`: what trained models make."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .console import make_console, progress_bar

if TYPE_CHECKING:
    import typer
    from torch import Tensor


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion

    generate = typer.Typer(no_args_is_help=True, help="What trained models make.")
    app.add_typer(generate, name="generate")

    @generate.callback()
    def group() -> None:
        pass

    @generate.command("text")
    def text(
        model: Annotated[Path, typer.Option(help="Folder of a causal language model and its tokenizer.")],
        prompt: Annotated[str, typer.Option(help="Text to continue.")],
        max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 100,
        temperature: Annotated[float, typer.Option(help="0: the likeliest token each time; 1: as the model gives them.")] = 0.0,
        top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of that total probability.")] = 1.0,
        seed: Annotated[int | None, typer.Option(help="Seed of the drawing.", show_default="another each time")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Continue a text, streamed as it is written, in memory that does not grow with it."""
        run_text(model, prompt, max_new_tokens, temperature, top_p, seed, device)

    @generate.command("images")
    def images(
        run: Annotated[Path, typer.Option(help="Folder of a run that learned to make images, or of a saved pipeline.")],
        label: Annotated[
            list[str] | None, typer.Option(help="Class, by name or number; repeatable.", show_default="every class")
        ] = None,
        count: Annotated[int, typer.Option(help="Images of each label: a row of the grid.")] = 8,
        guidance: Annotated[float, typer.Option(help="How much the class counts; 1: no guidance, in half the time.")] = 1.0,
        steps: Annotated[int, typer.Option(help="Steps of the sampler.")] = 50,
        sampler: Annotated[
            str,
            typer.Option(
                help="One that fits the run's objective; a wrong one lists them.",
                show_default="the usual one",
                autocompletion=completion.completing(completion.samplers),
            ),
        ] = "",
        seed: Annotated[int, typer.Option(help="Seed of the noise; the same seed gives the same images.")] = 0,
        height: Annotated[int, typer.Option(help="In pixels, of latents where the run makes latents; 0: as trained.")] = 0,
        width: Annotated[int, typer.Option(help="As height.")] = 0,
        autoencoder: Annotated[
            Path | None, typer.Option(help="Folder of the AutoencoderKL that encoded the run's data.")
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(
                help=".png: a grid; .npz: images and labels, as `eval images` reads them.", show_default="RUN/samples.png"
            ),
        ] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Draw images from a trained diffusion transformer."""
        options = {"guidance": guidance, "steps": steps, "sampler": sampler, "seed": seed, "height": height, "width": width}
        run_images(run, label or [], count, autoencoder, out or run / "samples.png", device, options)


def run_images(
    run: Path, labels: list[str], count: int, autoencoder: Path | None, out: Path, device: str, options: dict[str, Any]
) -> None:
    from ..atomic_files import refuse_unwritable
    from ..recipes import load_pipeline

    if out.suffix not in (".png", ".npz"):
        raise ValueError(f"--out must end in .png, a grid, or .npz, images and labels, got {out}")
    if count < 1:
        raise ValueError(f"--count must be positive, got {count}")
    # sampling takes minutes
    refuse_unwritable(out)
    console = make_console()
    pipeline = load_pipeline(run, autoencoder=autoencoder, device=device)
    chosen: Sequence[int | str] = labels or range(pipeline.transformer.num_classes)
    numbers = [pipeline.number_of(label) for label in chosen for _ in range(count)]
    with progress_bar(console, "images", total=len(numbers), count="{task.percentage:.0f}%") as (progress, bar):
        made = pipeline.sample(numbers, **options, advance=lambda images: progress.advance(bar, images))
    write_images(made, numbers, out, columns=count)
    console.print(f"{len(numbers)} images of {len(chosen)} labels: {out}", soft_wrap=True)


def write_images(images: "Tensor", labels: Sequence[int], out: Path, *, columns: int) -> None:
    """A grid, or an .npz file with images [N, H, W, 3] and labels [N]; whole or not there."""
    import numpy as np

    from ..atomic_files import atomic_file
    from ..recipes import grid_of

    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as aside, aside.open("wb") as file:
        if out.suffix == ".png":
            grid_of(images, columns=columns).save(file, format="PNG")
        else:
            np.savez_compressed(file, images=images.permute(0, 2, 3, 1).numpy(), labels=np.array(labels))


def run_text(
    model: Path, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None, device: str
) -> None:
    from transformers.utils import logging

    from ..evaluation import load_language_model
    from ..models.language.writing import Writer

    # a bar of 20 weights is no news
    logging.disable_progress_bar()
    console = make_console()
    loaded = load_language_model(model, device=device)
    writer = Writer(loaded.model, loaded.tokenizer)
    start = time.perf_counter()
    written = writer.write(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        # lines break where the model breaks them
        say=lambda piece: console.print(piece, end="", soft_wrap=True),
    )
    seconds = time.perf_counter() - start
    size = "" if written.cache_bytes is None else f", cache {written.cache_bytes / 2**20:.3g} MiB"
    console.print(
        f"\n{written.num_tokens} tokens, {written.num_tokens / seconds:.3g} tokens/s on {writer.model.device.type}{size}"
    )
    if written.note:
        console.print(written.note, soft_wrap=True)
