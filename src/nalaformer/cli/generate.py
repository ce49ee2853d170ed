"""`nalaformer generate ...`: what trained models make."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console

if TYPE_CHECKING:
    import typer


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
        seed: Annotated[int | None, typer.Option(help="Of the drawing.", show_default="another each time")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Continue a text, streamed as it is written, in memory that does not grow with it."""
        run_text(model, prompt, max_new_tokens, temperature, top_p, seed, device)


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
