"""Commands about backbones and their weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from .console import make_console

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the commands."""
    import typer

    from . import completion

    of_backbones, of_families = (completion.completing(names) for names in (completion.backbones, completion.families))

    @app.command()
    def models(
        pattern: Annotated[
            str, typer.Argument(help="Names to show, for example 'nalaformer_*'.", autocompletion=of_backbones)
        ] = "*",
    ) -> None:
        """List the backbones: which stages are linear, parameters, multiply-adds, published accuracy."""
        run_models(pattern)

    @app.command()
    def convert(
        file: Annotated[Path, typer.Argument(help="The authors' checkpoint, .pth or .safetensors.")],
        family: Annotated[
            str, typer.Option(help="nalaformer, polaformer, polaformerpp, flatten, rala or mala.", autocompletion=of_families)
        ],
        out: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
        model: Annotated[
            str, typer.Option(help="A backbone that the weights must fit; checked before writing.", autocompletion=of_backbones)
        ] = "",
    ) -> None:
        """Translate a published checkpoint into our names, as safetensors."""
        run_convert(file, family, out, model)


def run_models(pattern: str) -> None:
    from fnmatch import filter as matching

    from ..models.vision import VARIANTS, card, cards_table, notes_of

    console = make_console()
    names = matching(VARIANTS, pattern)
    if not names:
        raise ValueError(f"no backbone is named like {pattern!r}; `nalaformer models` lists all {len(VARIANTS)}")
    found = [card(name) for name in names]
    console.print(cards_table(found))
    for line in notes_of(found):
        console.print(line)


def run_convert(file: Path, family: str, out: Path, model: str) -> None:
    from ..published import convert_file

    names = convert_file(file, out, family, model=model)
    make_console().print(f"{len(names)} tensors: {out}", soft_wrap=True)
