"""The data of a row on the device, made once for all processes that train on it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..fast_training.data_on_device import Bucket, load_to_device
from ..sequence_task import Sequences, SequencesConfig
from ..sequences import SequenceData

Say = Callable[[str], None]
SPLITS = ("train", "dev", "test")


class Loaded:
    """The three splits on the device. file: what `keep_data` wrote of this task; without it the data are made here."""

    def __init__(self, task: Sequences, device: str, say: Say, file: Path | None = None) -> None:
        started = time.monotonic()
        self.task, self.facts = task, task.facts()
        parts = made_data(task, device) if file is None else read_data(file, device)
        self.train, self.dev, self.test = (parts[split] for split in SPLITS)
        counts = [sum(len(bucket) for bucket in parts[split]) for split in SPLITS]
        say(f"data: {counts[0]} train, {counts[1]} dev, {counts[2]} test sequences in {time.monotonic() - started:.0f} s")


def made_data(task: Sequences, device: str) -> dict[str, list[Bucket]]:
    data: dict[str, SequenceData] = dict(zip(SPLITS, (task.train_data, task.eval_data, task.test_data), strict=True))
    return {split: load_to_device(each, device, only_answers=split != "train") for split, each in data.items()}


@dataclass(frozen=True)
class TaskData:
    """The data of one task, to be made."""

    label: str
    config: SequencesConfig


class DataToMake:
    """Tasks whose data are to be made, as `finished_in_processes` takes them."""

    def __init__(self, configs: dict[str, SequencesConfig]) -> None:
        self.left = [TaskData(title, config) for title, config in configs.items()]
        self.total = len(self.left)

    def __len__(self) -> int:
        return len(self.left)

    def take(self) -> TaskData | None:
        return self.left.pop(0) if self.left else None

    def mark_failed(self, task: TaskData, /) -> None:
        """The error is told with those of the others."""


def keep_data(task: TaskData, stop_file: Path, *, folder: Path) -> Path:
    """Make the data of a task and write them to the file that `data_file` names; a process does it to the end."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for split, buckets in made_data(Sequences(task.config), "cpu").items():
        for number, bucket in enumerate(buckets):
            named = {"inputs": bucket.inputs, "at": bucket.at, "targets": bucket.targets, "group": bucket.group}
            tensors |= {f"{split}.{number}.{name}": x.contiguous() for name, x in named.items() if x is not None}
    file = data_file(task.label, folder)
    save_file(tensors, file)
    return file


def data_file(title: str, folder: Path) -> Path:
    return folder / f"{title}.safetensors"


def read_data(file: Path, device: str) -> dict[str, list[Bucket]]:
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(file, device=device)
    found: dict[str, list[Bucket]] = {split: [] for split in SPLITS}
    for split, buckets in found.items():
        while f"{split}.{len(buckets)}.inputs" in tensors:
            own = f"{split}.{len(buckets)}."
            inputs, targets, group = (tensors[own + name] for name in ("inputs", "targets", "group"))
            buckets.append(Bucket(inputs=inputs, at=tensors.get(own + "at"), targets=targets, group=group))
    return found
