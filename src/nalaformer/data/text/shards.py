"""Tokens on disk: plain arrays that are mapped into memory, a piece at a time.

    folder/
      index.json          {"format": "nalaformer tokens 1", "vocab_size": 32000, "shards": ["00000", "00001"]}
      tokens_00000.npy    uint16 or uint32 [tokens]: the documents, one after the other
      ends_00000.npy      int64 [documents]: where each document ends (optional: one document)
      learned_00000.npy   bool [tokens]: whether the token is to be predicted (optional: all are)

index.json may also hold "bytes" (of the text, for bits per byte) and "tokenizer" (its fingerprint). Whatever makes such
files, a tokenizer of your own or another program, can be trained on.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...json_text import parse_json
from ..mapped_files import mapped

FORMAT = "nalaformer tokens 1"
INDEX = "index.json"
# 64 Mi tokens: 128 MiB of 16-bit tokens in memory while writing, few files for billions
SHARD_TOKENS = 2**26


class Shard:
    """Tokens, ends of documents, and what is learned of them; in memory, or in files that are mapped when first used."""

    def __init__(self, tokens: NDArray[Any], ends: NDArray[Any], learned: NDArray[Any] | None = None) -> None:
        self.tokens, self.ends, self.learned = tokens, ends, learned


class FileShard(Shard):
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        if not self.path("tokens").is_file():
            raise ValueError(f"{folder / INDEX} lists the shard {name!r}, got no file {self.path('tokens')}")
        if self.tokens.dtype not in (np.uint16, np.uint32) or self.tokens.ndim != 1:
            raise ValueError(
                f"tokens must be uint16 or uint32 in one dimension, got {self.tokens.dtype} {list(self.tokens.shape)} in "
                f"{self.path('tokens')}"
            )
        ends = self.ends
        is_ordered = ends.ndim == 1 and len(ends) > 0 and bool(np.all(np.diff(ends, prepend=0) > 0))
        if not is_ordered or ends[-1] != len(self.tokens):
            raise ValueError(
                f"ends of documents must rise to the number of tokens ({len(self.tokens)}), see {self.path('ends')}"
            )
        if self.learned is not None and (self.learned.dtype != np.bool_ or self.learned.shape != self.tokens.shape):
            raise ValueError(f"learned must be bool and as long as the tokens ({len(self.tokens)}), see {self.path('learned')}")

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}_{self.name}.npy"

    @cached_property
    def tokens(self) -> NDArray[Any]:  # type: ignore[override]
        return mapped(self.path("tokens"))

    @cached_property
    def ends(self) -> NDArray[Any]:  # type: ignore[override]
        return mapped(self.path("ends")) if self.path("ends").exists() else np.array([len(self.tokens)], np.int64)

    @cached_property
    def learned(self) -> NDArray[Any] | None:  # type: ignore[override]
        return mapped(self.path("learned")) if self.path("learned").exists() else None

    # a loader's worker maps the files itself: a mapped array would be sent as a whole
    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "name": self.name}


class TokenShards:
    """A folder of tokens, or shards in memory."""

    def __init__(
        self, shards: Sequence[Shard], *, vocab_size: int, bytes: int | None = None, tokenizer: str = "", place: str = "memory"
    ) -> None:
        self.shards, self.vocab_size, self.place = tuple(shards), vocab_size, place
        self.bytes, self.tokenizer = bytes, tokenizer

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        path = Path(folder) / INDEX
        if not path.is_file():
            raise ValueError(
                f"{folder} must be a folder of tokens, got no {INDEX} in it; `nalaformer tokenize` writes such folders"
            )
        try:
            index = parse_json(path.read_bytes())
            if index["format"] != FORMAT:
                raise ValueError(f"format {index['format']!r} and not {FORMAT!r}")
            names = [str(name) for name in index["shards"]]
            vocab_size, num_bytes = int(index["vocab_size"]), index.get("bytes")
        # a vocabulary of 1e999 is an infinite float to JSON, and no integer
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__} {error}") from error
        # an index is no permission to read elsewhere
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{path} names a shard outside of its folder")
        if not names:
            raise ValueError(f"{path} lists no shards")
        shards = [FileShard(Path(folder), name) for name in names]
        return cls(shards, vocab_size=vocab_size, bytes=num_bytes, tokenizer=index.get("tokenizer", ""), place=str(folder))

    @property
    def tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(len(shard.ends) for shard in self.shards)


class ShardWriter:
    """Collects documents and writes a file whenever enough have come together; `close` writes the index, last."""

    def __init__(self, folder: Path, *, vocab_size: int, tokenizer: str = "", shard_tokens: int = SHARD_TOKENS) -> None:
        if not 1 <= vocab_size <= 2**32:
            raise ValueError(f"vocab_size must be at least 1 and fit 32 bits, got {vocab_size}")
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be positive, got {shard_tokens}")
        self.folder, self.vocab_size, self.tokenizer, self.shard_tokens = folder, vocab_size, tokenizer, shard_tokens
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self.names: list[str] = []
        self.tokens = self.documents = self.bytes = 0
        self._empty()
        folder.mkdir(parents=True, exist_ok=True)

    def _empty(self) -> None:
        self.pending: list[NDArray[Any]] = []
        self.pending_learned: list[NDArray[Any]] = []
        self.pending_tokens = 0

    def add(self, tokens: Sequence[int], *, learned: Sequence[bool] | None = None, bytes: int = 0) -> None:
        """One document: its tokens, which of them are learned (all), and the size of its text in bytes."""
        array = np.asarray(tokens, dtype=np.int64)
        if array.ndim != 1 or not len(array):
            raise ValueError(f"a document must have at least one token, got shape {list(array.shape)}")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise ValueError(
                f"token ids must be at least 0 and below vocab_size ({self.vocab_size}), got {array.min()} to {array.max()}; "
                "the tokenizer has another vocabulary"
            )
        mask = np.ones(len(array), np.bool_) if learned is None else np.asarray(learned, dtype=np.bool_)
        if mask.shape != array.shape:
            raise ValueError(f"learned must be as long as the tokens ({len(array)}), got {len(mask)}")
        self.pending.append(array.astype(self.dtype))
        self.pending_learned.append(mask)
        self.pending_tokens += len(array)
        self.tokens += len(array)
        self.documents += 1
        self.bytes += bytes
        if self.pending_tokens >= self.shard_tokens:
            self._flush()

    def _flush(self) -> None:
        name = f"{len(self.names):05d}"
        learned = np.concatenate(self.pending_learned)
        np.save(self.folder / f"tokens_{name}.npy", np.concatenate(self.pending))
        np.save(self.folder / f"ends_{name}.npy", np.cumsum([len(tokens) for tokens in self.pending], dtype=np.int64))
        if not learned.all():
            np.save(self.folder / f"learned_{name}.npy", learned)
        self.names.append(name)
        self._empty()

    def close(self) -> None:
        if self.pending:
            self._flush()
        index = {"format": FORMAT, "vocab_size": self.vocab_size, "shards": self.names, "tokenizer": self.tokenizer}
        index |= {"tokens": self.tokens, "documents": self.documents} | ({"bytes": self.bytes} if self.bytes else {})
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
