"""Documents from text files: .txt and .jsonl, none of them trusted; also .jsonl.gz, where a file is read by name.

A row of a .jsonl file is an object with one of
- "text" (or a field of another name): a document;
- "prompt" and "response": taken as they are, one after the other; the response alone is learned;
- "messages": [{"role": ..., "content": ...}, ...]: a conversation; what the role "assistant" says is learned.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".jsonl")
PACKED = ".gz"
MOST_LINE = 2**26

# texts in order, each with whether a model is to learn it
Pieces = tuple[tuple[str, bool], ...]
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text, or a conversation of which a part is learned."""

    pieces: Pieces
    source: str
    """The file, and the line in it where the file holds many."""
    has_markup: bool = False
    """Whether special tokens in it are meant (a chat template writes them); elsewhere they are letters like others."""

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files become documents, and who is told what happens on the way."""

    field: str = "text"
    """Name of the text in a row of a .jsonl file."""
    txt_document: str = "file"
    """What of a .txt file is a document: "file" (all of it) or "line"."""
    render: Callable[[list[Message]], tuple[Pieces, bool]] | None = None
    """A conversation as pieces, and whether they hold special tokens; None: one line per message."""
    bad: Callable[[str], None] = lambda line: None
    """Told "file:line: why" for everything that is left out."""
    advance: Callable[[int], None] = lambda count: None
    """Told how many bytes were read."""

    def __post_init__(self) -> None:
        if self.txt_document not in ("file", "line"):
            raise ValueError(f'txt_document must be "file" or "line", got {self.txt_document!r}')


def find_text(paths: Sequence[str | Path]) -> list[Path]:
    """The files as given, and every .txt and .jsonl file below the folders as given, sorted within each."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise ValueError(f"a folder of texts must hold files ({', '.join(SUFFIXES)}), got none below {path}")
            found.extend(inside)
        elif path.is_file() and path.suffix in SUFFIXES:
            found.append(path)
        else:
            what = "got" if path.exists() else "and there is no"
            raise ValueError(f"a text must be a file that ends in {' or '.join(SUFFIXES)}, or a folder of them, {what} {path}")
    return found


def read_documents(files: Sequence[Path], reading: Reading | None = None) -> Iterator[Document]:
    """Every document of the files, in order, a line (or a .txt file) in memory at a time."""
    reading = reading or Reading()
    for file in files:
        if file.stat().st_size == 0:
            reading.bad(f"{file}: the file is empty")
        elif file.suffix == ".txt" and reading.txt_document == "file":
            yield from _whole_file(file, reading)
        else:
            yield from _lines(file, reading)


def _whole_file(file: Path, reading: Reading) -> Iterator[Document]:
    content = file.read_bytes()
    try:
        document = plain(content.decode("utf-8-sig"), str(file))
    except ValueError as error:
        reading.bad(f"{file}: {error}")
    else:
        yield document
    reading.advance(len(content))


def _lines(file: Path, reading: Reading) -> Iterator[Document]:
    is_rows = file.name.removesuffix(PACKED).endswith(".jsonl")
    with file.open("rb") as lines:
        for number, line in enumerate(_unpacked(file) if file.suffix == PACKED else lines, 1):
            # a blank line between documents is no document and no fault
            if line.strip():
                source = f"{file}:{number}"
                try:
                    # some editors begin a file with a mark of its encoding, which is no text
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    document = from_row(text, source, reading) if is_rows else plain(text.rstrip("\r\n"), source)
                    # JSON can hold halves of characters, which no tokenizer takes
                    document.text.encode()
                except (ValueError, RecursionError) as error:
                    reading.bad(f"{source}: {' '.join(str(error).split()) or type(error).__name__}")
                else:
                    yield document
            reading.advance(len(line))


def _unpacked(file: Path) -> Iterator[bytes]:
    """Lines of a .gz file; one that is longer than MOST_LINE comes in pieces, since few bytes can become many."""
    try:
        with gzip.open(file) as lines:
            while line := lines.readline(MOST_LINE):
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} must be a whole .gz file: {error}; get it again") from error


def plain(text: str, source: str) -> Document:
    if not text.strip():
        raise ValueError("the text is empty")
    return Document(pieces=((text, True),), source=source)


def from_row(line: str, source: str, reading: Reading) -> Document:
    """The document of one row; ValueError says what is wrong with it."""
    try:
        row = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        # its own message counts lines within this one
        raise ValueError(f"no JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    if reading.field in row:
        return plain(string_of(row, reading.field), source)
    if "messages" in row:
        pieces, has_markup = (reading.render or one_line_per_message)(messages_of(row["messages"]))
        return Document(pieces=pieces, source=source, has_markup=has_markup)
    if "prompt" in row and "response" in row:
        prompt, response = string_of(row, "prompt"), string_of(row, "response")
        if not response.strip():
            raise ValueError("the response is empty")
        return Document(pieces=((prompt, False), (response, True)), source=source)
    known = f'"{reading.field}", "messages", or "prompt" and "response"'
    raise ValueError(f"a row must have {known}, got {', '.join(map(repr, row)) or 'no field'}")


def string_of(row: dict[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f'"{name}" must be a string, got {type(row[name]).__name__}')
    return row[name]


def messages_of(value: Any) -> list[Message]:
    """Messages of which each has a role and a content, at least one of them the assistant's."""
    is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if not is_list or not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value):
        raise ValueError('"messages" must be a list of {"role": string, "content": string}')
    if not any(message["role"] == "assistant" for message in value):
        raise ValueError('"messages" must hold something that the role "assistant" says, got none')
    return [{"role": message["role"], "content": message["content"]} for message in value]


def one_line_per_message(messages: list[Message]) -> tuple[Pieces, bool]:
    """ "user: hello\\n" "assistant:" and then, learned, " hello\\n"; for tokenizers without a chat template."""
    pieces: list[tuple[str, bool]] = []
    for message in messages:
        if message["role"] == "assistant":
            pieces += [("assistant:", False), (f" {message['content']}\n", True)]
        else:
            pieces.append((f"{message['role']}: {message['content']}\n", False))
    return tuple(pieces), False
