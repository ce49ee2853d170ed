"""`nalaformer data encode` and `nalaformer data unpack`: images in the form that training reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console, progress_bar

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion

    data = typer.Typer(no_args_is_help=True, help="Images in the form that training reads.")
    app.add_typer(data, name="data")

    @data.command()
    def encode(
        images: Annotated[Path, typer.Argument(help="Folder with a folder of images for each class, or a .npz file.")],
        autoencoder: Annotated[Path, typer.Option(help="Folder of an AutoencoderKL of diffusers.")],
        out: Annotated[Path, typer.Option(help="Folder of the latents.")],
        image_size: Annotated[int, typer.Option(help="Side to which the images of a folder are cut and resized.")] = 256,
        holdout: Annotated[float, typer.Option(help="Share held out where there is no val split.")] = 0.0,
        seed: Annotated[int, typer.Option(help="Seed that decides what is held out.")] = 0,
        batch_size: Annotated[int, typer.Option(help="Images at once.")] = 16,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Encode images once; `data=FOLDER` in a recipe reads the latents. The same command goes on after a stop."""
        run_encode(images, autoencoder, out, image_size, holdout, seed, batch_size, device)

    @data.command()
    def unpack(
        file: Annotated[Path, typer.Argument(help="A .npz file with images and labels, such as Fashion-MNIST.")],
        out: Annotated[Path, typer.Option(help="Folder; it gets train/<class>/ and val/<class>/.")],
        holdout: Annotated[float, typer.Option(help="Share held out where the file has no val or test part.")] = 0.0,
        seed: Annotated[int, typer.Option(help="Seed that decides what is held out.")] = 0,
    ) -> None:
        """Write the images of a .npz file as PNG files in a folder per class, from which classifiers learn."""
        from ..data.generation import unpack_images

        with settings_as_options():
            counts = unpack_images(file, out, holdout=holdout, seed=seed)
        told = ", ".join(f"{count:,} images of {split}" for split, count in counts.items())
        make_console().print(f"{out}: {told}", soft_wrap=True)


def run_encode(
    images: Path, autoencoder: Path, out: Path, image_size: int, holdout: float, seed: int, batch_size: int, device: str
) -> None:
    from ..data.generation import GenerationDataConfig, encode_images
    from ..training.ranks import find_device

    with settings_as_options():
        config = GenerationDataConfig(data=str(images), image_size=image_size, holdout=holdout, data_seed=seed)
    console = make_console(stderr=True)
    with progress_bar(console, "encoding", count="{task.completed:.0f} images") as (progress, bar):

        def advance(done: int, total: int) -> None:
            progress.update(bar, advance=done, total=total)

        with settings_as_options():
            place = str(find_device(device))
            about = encode_images(config, autoencoder, out, batch_size=batch_size, device=place, advance=advance)
    console = make_console()
    for line in about["left_out"]:
        console.print(f"left out: {line}", soft_wrap=True)
    counts = ", ".join(f"{count:,} latents of {split}" for split, count in about["counts"].items())
    shape = " x ".join(map(str, about["shape"]))
    console.print(f"{out}: {counts}, {shape} each", soft_wrap=True)


@contextmanager
def settings_as_options() -> Iterator[None]:
    """Errors that advise a setting of training advise the option of the command instead."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("holdout=", "--holdout ")) from error
