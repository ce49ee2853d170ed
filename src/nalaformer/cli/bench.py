"""`nalaformer bench`: linear attention beside softmax attention on this machine."""

from typing import TYPE_CHECKING, Annotated

from .console import make_console, print_table, progress_bar, table_of

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Enter the command."""
    import typer

    from . import completion

    @app.command()
    def bench(
        tokens: Annotated[
            list[int] | None, typer.Option(help="Tokens; may be repeated.", show_default="256 to 16,384; cuda: to 65,536")
        ] = None,
        heads: Annotated[int, typer.Option(help="Heads.", min=1)] = 4,
        head_dim: Annotated[int, typer.Option(help="Channels of a head.", min=1)] = 64,
        feature_map: Annotated[str, typer.Option(help="Feature map of linear attention.")] = "norm_aware",
        causal: Annotated[bool, typer.Option("--causal", help="Each token sees those before it.")] = False,
        backward: Annotated[bool, typer.Option("--backward", help="With gradients, as in training.")] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
        seconds: Annotated[float, typer.Option(help="Seconds of timing per row and method.")] = 0.5,
    ) -> None:
        """Time linear attention beside torch's softmax attention on this machine."""
        shape = {"heads": heads, "head_dim": head_dim, "feature_map": feature_map, "causal": causal, "backward": backward}
        run_bench(tokens, device, seconds, shape)


def run_bench(tokens: list[int] | None, device: str, seconds: float, shape: dict[str, object]) -> None:
    """Measure each number of tokens and print the table."""
    from ..op_bench import compare_with_softmax, default_tokens
    from ..training.ranks import find_device

    place = find_device(device).type
    counts = tokens or default_tokens(place)
    table = table_of("tokens", "linear, ms", "softmax, ms", "softmax / linear")
    with progress_bar(make_console(), "timing", total=len(counts)) as (progress, bar):
        for count in counts:
            found = compare_with_softmax(count, device=place, seconds=seconds, **shape)  # type: ignore[arg-type]
            ratio = found.softmax_ms / found.linear_ms
            table.add_row(f"{count:,}", f"{found.linear_ms:.3g}", f"{found.softmax_ms:.3g}", f"{ratio:.2f}")
            progress.advance(bar)
    print_table(f"{shape['heads']} heads of {shape['head_dim']}, {shape['feature_map']}, {place}", table)
