"""`nalaformer predict`: what a trained model says of images, as a table, as pictures and in files for programs."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .console import make_console, print_table

if TYPE_CHECKING:
    import typer

    from ..recipes import LoadedRun, Prediction


def add_to(app: "typer.Typer") -> None:
    """Enter the command."""
    import typer

    from . import completion

    @app.command()
    def predict(
        images: Annotated[list[Path], typer.Argument(help="Images, or folders of them.")],
        run: Annotated[Path, typer.Option(help="Folder of the run whose model is asked.")],
        out: Annotated[
            Path | None, typer.Option(help="File (of one image) or folder for pictures.", show_default="RUN/predictions")
        ] = None,
        json_file: Annotated[Path | None, typer.Option("--json", help="Write the answers to this JSON file.")] = None,
        csv_file: Annotated[
            Path | None, typer.Option("--csv", help="Write the answers to this CSV file, a row for each thing named.")
        ] = None,
        coco: Annotated[Path | None, typer.Option(help="Detection: write COCO's results to this JSON file.")] = None,
        annotations: Annotated[
            Path | None,
            typer.Option(help="Annotation file with the ids for --coco.", show_default="ids from 1 on"),
        ] = None,
        label_maps: Annotated[
            Path | None, typer.Option(help="Segmentation: write the class of each pixel as PNG into this folder.")
        ] = None,
        choose: Annotated[
            list[str] | None, typer.Option("--set", help="key=value that the task offers; a wrong key lists them.")
        ] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or auto.", autocompletion=completion.devices)] = "auto",
    ) -> None:
        """Ask a run about images: a table of answers, files for programs and, where the task has pictures, one of each."""
        files = AnswerFiles(images, json_file=json_file, csv_file=csv_file, coco=coco, annotations=annotations)
        run_predict(images, run, out, label_maps, files, choose or [], device)


class AnswerFiles:
    """The files for programs that a command writes, each of them whole and at its end."""

    def __init__(
        self, images: list[Path], *, json_file: Path | None, csv_file: Path | None, coco: Path | None, annotations: Path | None
    ) -> None:
        from ..atomic_files import refuse_unwritable
        from ..data import find_images

        self.json_file, self.csv_file, self.coco, self.annotations = json_file, csv_file, coco, annotations
        self.images = find_images(images)
        self.records: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        if annotations is not None and coco is None:
            raise ValueError(f"--annotations has the ids for --coco, got {annotations} without it; add --coco FILE")
        for file in (json_file, csv_file, coco):
            if file is not None:
                refuse_unwritable(file)

    def prepare(self, run: "LoadedRun") -> None:
        """Refuse what the run cannot answer, before it is asked."""
        if self.coco is None:
            return
        from ..data.detection import ids_of, numbered

        refuse_other_task(run, "detection", "--coco")
        classes = run.facts["classes"]
        self.ids = numbered(self.images, classes)
        if self.annotations is not None:
            self.ids = ids_of(self.annotations, self.images, classes)

    def add(self, prediction: "Prediction", written: dict[str, Path]) -> None:
        """Keep one answer; written: the pictures that were made of it, by what they are."""
        record: dict[str, Any] = {"image": str(prediction.path)} | {name: str(path) for name, path in written.items()}
        if prediction.answer is None:
            self.records.append(record | {"error": prediction.error, "answers": []})
            return
        self.records.append(record | {"answers": list(prediction.answer.rows)})
        if self.coco is not None:
            from ..data.detection import coco_results

            self.results += coco_results(prediction.path, prediction.answer.values, self.ids)

    def write(self, run: "LoadedRun", folder: Path) -> list[Path]:
        """Write those that were asked for; their paths."""
        from ..atomic_files import write_csv

        about = {"run": str(folder), "model": run.recipe.model, "step": run.step}
        if self.json_file is not None:
            write_json(self.json_file, about | {"images": self.records})
        if self.csv_file is not None:
            # an image of which nothing is named has a row all the same
            rows = [record | row for record in self.records for row in record["answers"] or [{}]]
            columns = [name for row in rows for name in row if name not in ("answers", "error")]
            has_errors = any("error" in row for row in rows)
            write_csv(self.csv_file, [*dict.fromkeys(columns), *(["error"] if has_errors else [])], rows)
        if self.coco is not None:
            write_json(self.coco, self.results)
        return [file for file in (self.json_file, self.csv_file, self.coco) if file is not None]


def write_json(path: Path, content: object) -> None:
    from ..atomic_files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))


def refuse_other_task(run: "LoadedRun", wanted: str, option: str) -> None:
    from ..tasks import task_name

    kind = task_name(run.recipe.task)
    if kind != wanted:
        raise ValueError(f"{option} is for runs of {wanted}, got one of {kind}; write its answers by --json FILE or --csv FILE")


def run_predict(
    images: list[Path],
    run: Path,
    out: Path | None,
    label_maps: Path | None,
    files: AnswerFiles,
    options: list[str],
    device: str,
) -> None:
    from ..recipes import answers_of, load_answering_run
    from .pictures import PictureWriter

    if out is not None and out.suffix.lower() in (".csv", ".json"):
        raise ValueError(f"--out is for pictures, got {out}; write the answers by --{out.suffix.lower()[1:]} {out}")
    # the images first: a model takes seconds to load
    pictures = PictureWriter(out or run / "predictions", inputs=images)
    maps = None if label_maps is None else PictureWriter(label_maps, inputs=images, option="--label-maps")
    loaded = load_answering_run(run)
    files.prepare(loaded)
    if out is not None and not loaded.task.has_pictures:
        raise ValueError(f"--out is for pictures, and {run} draws none; write its answers by --json FILE or --csv FILE")
    if maps is not None:
        refuse_other_task(loaded, "segmentation", "--label-maps")
    found: list[tuple[str, ...]] = []
    errors = []
    with image_bar(files.images) as (advance, advance_layer):
        for prediction in answers_of(loaded, images, options=options, device=device, advance=advance_layer):
            advance()
            written: dict[str, Path] = {}
            answer = prediction.answer
            if answer is None:
                errors.append(prediction.error)
            elif answer.picture is not None:
                written["picture"] = pictures.write(prediction.path, answer.picture)
            if answer is not None and maps is not None:
                written["label_map"] = maps.write(prediction.path, map_of(answer.values, loaded))
            files.add(prediction, written)
            found.append((str(prediction.path), *(("-",) if answer is None else answer.cells)))
    show_answers(f"by {run}, {loaded.step_name}", loaded.task.headings, found)
    console = make_console()
    if pictures.written:
        console.print(f"pictures: {pictures.target}", soft_wrap=True, markup=False)
    if maps is not None and maps.written:
        console.print(f"label maps: {maps.target}", soft_wrap=True, markup=False)
    for file in files.write(loaded, run):
        console.print(f"answers: {file}", soft_wrap=True, markup=False)
    for error in errors:
        console.print(f"left out: {error}", soft_wrap=True, markup=False)
    if errors:
        sys.exit(1)


def map_of(labels: Any, run: "LoadedRun") -> Any:
    from ..tasks.segmentation import label_map

    return label_map(labels, [(red, green, blue) for red, green, blue in run.facts["colours"]])


def show_answers(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table without the columns that are empty everywhere."""
    from rich.table import Table

    table = Table()
    for heading in ("image", *headings)[: max(map(len, rows))]:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(title, table)


@contextmanager
def image_bar(images: list[Path]) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """A bar over the images with the time and the layers of the one at work, on a terminal; within, call to say what is done.

    The second function is for each layer: a large image takes minutes, which a bar over images would not show.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = make_console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total}, {task.fields[layers]} layers of the next"),
        TimeElapsedColumn(),
    )
    layers = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("images", total=len(images), layers=0)

        def advance() -> None:
            nonlocal layers
            layers = 0
            progress.update(bar, advance=1, layers=0)

        def advance_layer() -> None:
            nonlocal layers
            layers += 1
            progress.update(bar, layers=layers)

        yield advance, advance_layer
