"""From text files to tokens: out/tokenizer, out/train and out/val, all of them whole or none there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...atomic_files import atomic_folder, free_bytes, megabytes, refuse_content, refuse_full_disk
from ...folder_lock import refuse_in_use
from .documents import Document, Reading, find_text, one_line_per_message, read_documents
from .shards import SHARD_TOKENS, Shard, ShardWriter, TokenShards
from .tokenizer import ChatTemplate, check_vocab_size, encode, fingerprint, load_tokenizer, start_token, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, BAD_LINES = "tokenizer", "bad_lines.txt"
# documents that are encoded at once: tokenizers work on them in parallel
BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """What has become of a corpus."""

    folder: Path
    documents: dict[str, int]
    """Documents of each split."""
    tokens: dict[str, int]
    """Tokens of each split."""
    vocab_size: int
    bad: tuple[str, ...] = field(default=())
    """ "file:line: why" for everything that was left out; also in bad_lines.txt."""


def tokenize_corpus(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    train_vocab: int | None = None,
    val_files: Sequence[str | Path] = (),
    val_part: float = 0.01,
    reading: Reading | None = None,
    most_bad: int = 100,
    shard_tokens: int = SHARD_TOKENS,
    started: Callable[[str, int], None] = lambda what, total: None,
) -> Tokenized:
    """Write the files' documents as tokens, with the tokenizer of a folder or one trained on them with `train_vocab` entries.

    val_files: for out/val; without them each document goes there with probability `val_part`, chosen by its number alone.
    most_bad: lines that may be left out before this stops. started: told each pass over the text, and its size in bytes.
    """
    splits = find_splits(files, out, tokenizer=tokenizer, train_vocab=train_vocab, val_files=val_files, val_part=val_part)
    reading = reading or Reading()
    bad: list[str] = []

    tell = reading.bad

    def note_bad(line: str) -> None:
        tell(line)
        bad.append(line)
        if len(bad) > most_bad:
            raise ValueError(
                f"more than {most_bad} lines cannot be read, the last of them {line}; mend them, or allow more (--most-bad)"
            )

    with atomic_folder(out) as folder:
        if tokenizer is not None:
            words = load_tokenizer(tokenizer)
        else:
            assert train_vocab is not None
            started("learning the vocabulary", size_of(splits["train"]))
            # read twice: what is wrong with a line is told the second time
            texts = (d.text for d in read_documents(splits["train"], replace(reading, render=None, bad=lambda line: None)))
            words = train_tokenizer(texts, vocab_size=train_vocab)
        words.save_pretrained(str(folder / TOKENIZER))
        encoder = Encoder(words)
        reading = replace(reading, bad=note_bad, render=encoder.render)
        started("writing tokens", size_of(splits["train"]) + size_of(splits["val"]))
        writers = {
            split: ShardWriter(folder / split, vocab_size=len(words), tokenizer=fingerprint(words), shard_tokens=shard_tokens)
            for split in splits
        }
        chosen = np.random.default_rng(0)
        for split, paths in splits.items():
            for document, tokens, learned in encoder.encode(read_documents(paths, reading)):
                is_drawn = not val_files and chosen.random() < val_part
                writers["val" if is_drawn else split].add(tokens, learned=learned, bytes=len(document.text.encode()))
        refuse_empty({split: writer.documents for split, writer in writers.items()}, bad)
        for writer in writers.values():
            writer.close()
        if bad:
            (folder / BAD_LINES).write_text("".join(line + "\n" for line in bad))
    return Tokenized(
        folder=Path(out),
        documents={split: writer.documents for split, writer in writers.items()},
        tokens={split: writer.tokens for split, writer in writers.items()},
        vocab_size=len(words),
        bad=tuple(bad),
    )


class NothingToEvaluate(ValueError):
    """No document is left for evaluation. Callers whose options differ from ours catch this and name their own remedy."""


def find_splits(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None,
    train_vocab: int | None,
    val_files: Sequence[str | Path],
    val_part: float,
) -> dict[str, list[Path]]:
    """The files of "train" and "val", after everything that can be checked without reading them."""
    if (tokenizer is None) == (train_vocab is None):
        raise ValueError(
            "a corpus needs a tokenizer or the size of one to train, and not both: --tokenizer DIR or --train-vocab N"
        )
    if train_vocab is not None:
        check_vocab_size(train_vocab)
    if not 0 <= val_part < 1:
        raise ValueError(f"val_part must be at least 0 and below 1, got {val_part}")
    splits = {"train": find_text(files), "val": find_text(val_files) if val_files else []}
    refuse_content(Path(out))
    refuse_full_disk(Path(out), tokens_bytes(splits), "a corpus")
    return splits


def tokens_bytes(splits: dict[str, list[Path]]) -> int:
    """What tokens take on the disk, about: two bytes for four of text."""
    return sum(size_of(paths) for paths in splits.values()) // 2


def plan_corpus(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    train_vocab: int | None = None,
    val_files: Sequence[str | Path] = (),
    val_part: float = 0.01,
) -> list[str]:
    """What `tokenize_corpus` would do, in words. Refuses what that would refuse before it reads the text; writes nothing."""
    splits = find_splits(files, out, tokenizer=tokenizer, train_vocab=train_vocab, val_files=val_files, val_part=val_part)
    refuse_in_use(out, beside=True)
    words = f"of {tokenizer}, {len(load_tokenizer(tokenizer)):,} entries" if tokenizer else f"trained, {train_vocab:,} entries"
    texts = [f"{split}: {len(paths):,} files, {megabytes(size_of(paths))}" for split, paths in splits.items() if paths]
    if not val_files:
        texts.append(f"val: {val_part:.3g} of the documents")
    room = f"about {megabytes(tokens_bytes(splits))}, {megabytes(free_bytes(Path(out)))} are free"
    return [*texts, f"tokenizer: {words}", f"folder: {out}; {room}"]


def refuse_empty(documents: dict[str, int], bad: list[str]) -> None:
    if not documents["train"]:
        raise ValueError(f"a corpus must hold a document, got none that could be read{f'; the first: {bad[0]}' if bad else ''}")
    if not documents["val"]:
        raise NothingToEvaluate(
            f"some documents must be left for evaluation, got none of {documents['train']}; give files for it (--val), a "
            "larger part (--val-part), or read a .txt file by lines (--txt line)"
        )


def size_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


class Encoder:
    """Documents as tokens: begin, the pieces, end. The end is learned where the last piece is, the begin never.

    A begin and an end that the chat template writes are not written again.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.begin, self.end = start_token(tokenizer), int(tokenizer.eos_token_id)
        has_template = getattr(tokenizer, "chat_template", None)
        self.render = ChatTemplate(tokenizer) if has_template else one_line_per_message

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, list[int], list[bool]]]:
        """Each document with its tokens and which of them are learned."""
        source = iter(documents)
        while batch := list(islice(source, BATCH)):
            encoded = {
                markup: iter(encode(self.tokenizer, texts_of(batch, markup), has_markup=markup)) for markup in (False, True)
            }
            for document in batch:
                tokens, learned = [self.begin], [True]
                for _, is_learned in document.pieces:
                    piece = next(encoded[document.has_markup])
                    tokens += piece
                    learned += [is_learned] * len(piece)
                if document.has_markup and tokens[1:2] == [self.begin]:
                    # the chat template has written it, as it will where the model is used
                    tokens, learned = tokens[1:], learned[1:]
                # so does many a template write the end, or a line after it
                if not (document.has_markup and document.text.rstrip().endswith(str(self.tokenizer.eos_token))):
                    tokens, learned = [*tokens, self.end], [*learned, learned[-1]]
                yield document, tokens, learned

    def in_memory(self, texts: Iterable[str]) -> TokenShards:
        """A small corpus that is not worth a file."""
        documents = [Document(pieces=((text, True),), source="") for text in texts]
        encoded = [tokens for _, tokens, _ in self.encode(documents)]
        dtype = np.uint16 if len(self.tokenizer) <= 2**16 else np.uint32
        shard = Shard(np.concatenate(encoded).astype(dtype), np.cumsum([len(tokens) for tokens in encoded], dtype=np.int64))
        num_bytes = sum(len(document.text.encode()) for document in documents)
        return TokenShards([shard], vocab_size=len(self.tokenizer), bytes=num_bytes, tokenizer=fingerprint(self.tokenizer))


def texts_of(documents: list[Document], markup: bool) -> list[str]:
    return [text for document in documents if document.has_markup == markup for text, _ in document.pieces]
