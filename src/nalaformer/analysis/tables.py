"""The comparison as a table for the terminal."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .compare import TIMED_TOKENS, Row

if TYPE_CHECKING:
    from rich.table import Table

HOW_TO_READ = (
    "A method that attends more sharply as the query grows has a correlation near -1 and a clear drop in entropy; where the "
    "query norm cancels, the correlation is 0. The higher the effective rank, the more the queries differ in what they see."
)
CAPTION = (
    "Spearman: of query norm and attention entropy, 0 if the drop is under 0.02 nats. PSE: entropy over the channels of φ(q). "
    'Effective rank: exp of the entropy of the normalised singular values. head: norm_scale="head".'
)


def comparison_table(rows: Iterable[Row], *, num_tokens: int) -> "Table":
    """Return a table with one line per method."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"Attention over {num_tokens} random tokens whose query norms run from 0.1 to 10",
        caption=CAPTION,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", no_wrap=True)
    for title in (
        "Spearman",
        "drop\nnats",
        "PSE\nfalls",
        "smallest\nweight",
        "effective\nrank",
        f"ms, {TIMED_TOKENS}\ntokens",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> tuple[str, ...]:
    """Return the row as text."""
    falls = {True: "yes", False: "no", None: "-"}[row.channel_entropy_falls]
    return (
        row.label,
        "0" if row.spearman == 0 else f"{row.spearman:+.2f}",
        # no minus in front of a rounded zero
        f"{round(row.entropy_drop, 3) + 0.0:.3f}",
        falls,
        "0" if row.smallest_weight == 0 else f"{row.smallest_weight:.1e}",
        f"{row.effective_rank:.1f}",
        "-" if row.milliseconds is None else f"{row.milliseconds:.1f}",
    )
