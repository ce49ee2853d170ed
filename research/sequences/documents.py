"""A file of texts as windows of tokens, each of which is asked for the next: byte-level BPE that is made of the file."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nalaformer.data.text import (
    Document,
    Encoder,
    PackedTokens,
    Reading,
    Shard,
    TokenShards,
    fingerprint,
    read_documents,
    train_tokenizer,
)
from nalaformer.data.text.tokenizer import check_vocab_size

from .base import IGNORE, SEQUENCES, Arrays, SequenceData, SequenceFacts

NAMES = (".jsonl", ".jsonl.gz", ".txt")
# one document in 50 is for val, and one for test where that has no file of its own
PART = 50
# characters that the vocabulary is made of: more change it little
VOCABULARY_TEXT = 4_000_000

Shares = NDArray[np.float64]


@SEQUENCES.register("documents")
class DocumentWindows(SequenceData):
    """Windows of `length` tokens; every token is asked for the next one of its document.

    file: .jsonl or .jsonl.gz with a "text" in each row, or .txt with a document in each line. Every fiftieth document is for
    val, and another one for test, unless `test_file` has those. The vocabulary is made of train documents alone. How many
    samples there are is what the documents give, at most `samples`.
    """

    stream_name = "documents"
    figure = "perplexity"

    def __init__(
        self,
        *,
        split: str,
        samples: int,
        seed: int = 0,
        file: str = "",
        test_file: str = "",
        vocabulary: int = 4096,
        length: int = 2048,
    ) -> None:
        super().__init__(split=split, samples=samples, seed=seed)
        for name, path in (("file", file), ("test_file", test_file or file)):
            if not path.endswith(NAMES) or not Path(path).is_file():
                raise ValueError(
                    f"{name} must be a file of texts that ends in {', '.join(NAMES)}, got {path!r}; pass "
                    'data_options=\'{"file": "/path/to/texts.jsonl.gz"}\''
                )
        check_vocab_size(vocabulary)
        if length < 1:
            raise ValueError(f"length must be the tokens of a window, at least 1, got {length}")
        self.vocabulary, self.length = vocabulary, length
        # a file that was written again is another one
        files = tuple((path, Path(path).stat().st_mtime_ns) for path in (file, test_file) if path)
        self.windows, shares = read_windows(files, split, vocabulary, length, samples)
        self.samples = min(samples, len(self.windows))
        self.chance = float(vocabulary)
        self.shortcuts = {"frequencies of tokens": self.frequency_perplexity(shares)}

    @property
    def facts(self) -> SequenceFacts:
        return SequenceFacts(answers="tokens", outputs=self.vocabulary, length=self.length, vocabulary=self.vocabulary)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        chosen = [self.windows[int(index)] for index in indices]
        inputs, targets = (np.stack([window[name].numpy() for window in chosen]) for name in ("input_ids", "targets"))
        return {"inputs": inputs.astype(np.int32), "targets": targets.astype(np.int32)}

    def frequency_perplexity(self, shares: Shares) -> float:
        """Return the perplexity of guessing each token by its frequency alone, on the first thousand windows."""
        targets = self.make(np.arange(min(self.samples, 1000)))["targets"]
        return math.exp(-np.log(shares[targets[targets != IGNORE]]).mean())


Files = tuple[tuple[str, int], ...]


def read_split(files: Files, split: str) -> list[Document]:
    """The documents of a split, shuffled: files are often sorted, and a part should be like the whole."""
    (path, _), *others = files
    if split == "test" and others:
        chosen = read(others[0][0])
    else:
        everything = read(path)
        held_out = {"val": 0} if others else {"val": 0, "test": 1}
        chosen = [
            document
            for number, document in enumerate(everything)
            if (number % PART == held_out[split] if split in held_out else number % PART not in held_out.values())
        ]
    if not chosen:
        raise ValueError(
            f"some documents must be left for {split}, one of {PART} for val and one for test, got too few in {path}; give more"
        )
    return [chosen[number] for number in np.random.default_rng(0).permutation(len(chosen))]


def read(path: str) -> list[Document]:
    return list(read_documents([Path(path)], Reading(txt_document="line")))


@lru_cache(maxsize=2)
def train_encoder(files: Files, vocabulary: int) -> tuple[Encoder, Shares]:
    """The tokenizer of the train documents, and the share of each of its tokens among theirs."""
    texts, size = [], 0
    for document in read_split(files, "train"):
        texts.append(document.text)
        size += len(document.text)
        if size >= VOCABULARY_TEXT:
            break
    encoder = Encoder(train_tokenizer(texts, vocab_size=vocabulary))
    (shard,) = encoder.in_memory(texts).shards
    # one more of each: none has a share of nothing
    counts = np.bincount(shard.tokens, minlength=vocabulary) + 1.0
    return encoder, counts / counts.sum()


@lru_cache(maxsize=6)
def read_windows(files: Files, split: str, vocabulary: int, length: int, samples: int) -> tuple[PackedTokens, Shares]:
    """Return as many windows as requested, or as there are, and the token frequencies of the train documents."""
    encoder, shares = train_encoder(files, vocabulary)
    found: list[NDArray[np.uint32]] = []
    total = 0
    for _, tokens, _ in encoder.encode(read_split(files, split)):
        found.append(np.array(tokens, np.uint32))
        total += len(tokens)
        if total >= samples * length:
            break
    shard = Shard(np.concatenate(found), np.cumsum([len(tokens) for tokens in found]))
    data = TokenShards([shard], vocab_size=vocabulary, tokenizer=fingerprint(encoder.tokenizer))
    return PackedTokens(data, length=length), shares
