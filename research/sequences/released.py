"""Long Range Arena data that cannot be generated, read from the released files when the user has them.

Nothing is unpickled: CIFAR-10 is read from its binary version (cifar-10-batches-bin), texts are plain files.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .base import SEQUENCES, Arrays, SequenceData, SequenceFacts


class Released(SequenceData):
    """Samples of a folder; how many there are is what the folder holds, at most `samples`."""

    def __init__(self, *, split: str, samples: int, seed: int = 0, root: str = "") -> None:
        super().__init__(split=split, samples=samples, seed=seed)
        self.root = Path(root)
        if not root or not self.root.is_dir():
            raise ValueError(
                f"root must be the folder of the released files ({self.layout}), got {root!r}; name it by "
                """data_options='{"root": "/path/to/files"}'"""
            )
        self.samples = min(samples, self.available)

    layout: str

    @property
    def available(self) -> int:
        raise NotImplementedError

    def require_path(self, path: Path) -> Path:
        if not path.exists():
            raise ValueError(f"{path} is missing; the folder must hold {self.layout}")
        return path


class ReleasedText(Released):
    """Texts as bytes, of two classes."""

    answers = "sequence"
    chance = 0.5

    def __init__(self, *, split: str, samples: int, seed: int = 0, root: str = "", length: int = 4000) -> None:
        self.length = length
        super().__init__(split=split, samples=samples, seed=seed, root=root)

    @property
    def facts(self) -> SequenceFacts:
        return SequenceFacts(answers=self.answers, outputs=2, length=self.length, vocabulary=257, is_padded=True)


@SEQUENCES.register("text")
class Text(ReleasedText):
    """IMDb reviews as bytes, good or bad; train/{neg,pos}/*.txt and test/{neg,pos}/*.txt, as in aclImdb.

    As in the Long Range Arena there is no split of its own for validation: "val" is the test folder.
    """

    layout = "train/neg, train/pos, test/neg, test/pos with a .txt file for each review"
    stream_name = "text"

    @cached_property
    def files(self) -> list[tuple[Path, int]]:
        folder = self.root / ("train" if self.split == "train" else "test")
        found = [
            (path, label)
            for label, name in enumerate(("neg", "pos"))
            for path in sorted(self.require_path(folder / name).glob("*.txt"))
        ]
        if not found:
            raise ValueError(f"{folder} must hold {self.layout}, got no .txt file")
        # the classes must not come one after the other where only a part is read
        order = np.random.default_rng((self.seed, self.stream)).permutation(len(found))
        return [found[place] for place in order]

    @property
    def available(self) -> int:
        return len(self.files)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        chosen = [self.files[index] for index in indices]
        inputs = np.stack([as_bytes(path.read_bytes(), self.length) for path, _ in chosen])
        return {"inputs": inputs, "targets": np.array([label for _, label in chosen])}


@SEQUENCES.register("retrieval")
class Retrieval(ReleasedText):
    """Pairs of papers (AAN) as bytes: does one cite the other? Files new_aan_pairs.{train,eval,test}.tsv, a line each:
    label, two ids, two texts, separated by tabs."""

    layout = "new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv"
    stream_name = "retrieval"
    answers = "pair"

    @property
    def path(self) -> Path:
        part = {"train": "train", "val": "eval", "test": "test"}[self.split]
        return self.require_path(self.root / f"new_aan_pairs.{part}.tsv")

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Offset of each line, and the end of the file; the lines themselves stay on disk."""
        content = np.memmap(self.path, np.uint8, "r")
        ends = np.flatnonzero(content == ord("\n")) + 1
        return np.unique(np.concatenate(([0], ends, [len(content)])))

    @property
    def available(self) -> int:
        return len(self.starts) - 1

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        inputs = np.zeros((len(indices), 2, self.length), np.uint16)
        labels = np.zeros(len(indices), np.int64)
        with self.path.open("rb") as file:
            for row, index in enumerate(indices):
                file.seek(self.starts[index])
                fields = file.readline().rstrip(b"\n").split(b"\t")
                if len(fields) != 5:
                    raise ValueError(f"line {index + 1} of {self.path} must have 5 fields separated by tabs, got {len(fields)}")
                labels[row] = int(float(fields[0]))
                inputs[row] = [as_bytes(text, self.length) for text in fields[3:]]
        return {"inputs": inputs, "targets": labels}


@SEQUENCES.register("image")
class GreyImage(Released):
    """CIFAR-10 in grey, a token for each pixel; the binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin.

    The last 5,000 training images are the validation split, as in the Long Range Arena.
    """

    layout = "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the binary version of CIFAR-10)"
    stream_name = "image"
    chance = 0.1
    record = 1 + 3 * 1024

    @property
    def facts(self) -> SequenceFacts:
        return SequenceFacts(answers="sequence", outputs=10, length=1024, vocabulary=256)

    @cached_property
    def records(self) -> NDArray[np.uint8]:
        names = ["test_batch.bin"] if self.split == "test" else [f"data_batch_{number}.bin" for number in range(1, 6)]
        parts = []
        for name in names:
            content = np.fromfile(self.require_path(self.root / name), np.uint8)
            if len(content) % self.record or not len(content):
                raise ValueError(
                    f"{self.root / name} must hold records of {self.record} bytes, got {len(content)} bytes in all"
                )
            parts.append(content.reshape(-1, self.record))
        every = np.concatenate(parts)
        kept = len(every) - len(every) // 10
        return {"train": every[:kept], "val": every[kept:], "test": every}[self.split]

    @property
    def available(self) -> int:
        return len(self.records)

    def make(self, indices: NDArray[np.int64]) -> Arrays:
        chosen = self.records[indices]
        colours = chosen[:, 1:].reshape(-1, 3, 1024).astype(np.float64)
        grey = np.round(np.array([0.299, 0.587, 0.114]) @ colours).astype(np.uint8)
        labels = chosen[:, 0].astype(np.int64)
        if labels.size and labels.max() > 9:
            raise ValueError(f"labels of CIFAR-10 are 0..9, got {labels.max()} in {self.root}")
        return {"inputs": grey, "targets": labels}


def as_bytes(text: bytes, length: int) -> NDArray[np.uint16]:
    """Bytes as tokens 1..256, cut or padded with 0."""
    tokens = np.zeros(length, np.uint16)
    content = np.frombuffer(text[:length], np.uint8)
    tokens[: len(content)] = content.astype(np.uint16) + 1
    return tokens
