"""Batches follow from seed and step, whoever reads them."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nalaformer.data import CorruptImage, batches_from, batches_in_order


class Numbers:
    """Sample i is i, and a random number, which stands for augmentation; listed ones are corrupt."""

    def __init__(self, count, corrupt=()):
        self.count, self.corrupt = count, corrupt

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.corrupt:
            raise CorruptImage(f"{index}.png", "made so")
        return index, torch.rand(()).item() + random.random() + np.random.rand()


def read(step, last_step, data=None, **options):
    batches = batches_from(step, data or Numbers(23), seed=3, batch_size=6, last_step=last_step, **options)
    return [(batch.content[0].tolist(), batch.content[1].tolist()) for batch in batches]


class Words(Numbers):
    """Samples that cannot be stacked."""

    def __getitem__(self, index):
        return "x" * index

    @staticmethod
    def collate(samples):
        return "|".join(samples)


def test_data_with_a_collate_of_its_own_is_put_together_by_it():
    (batch,) = batches_in_order(Words(3), batch_size=3)
    assert batch.content == "|x|xx"


@pytest.mark.parametrize("step", [1, 3, 5])
def test_batches_from_a_later_step_are_those_of_the_whole_run(step):
    whole = read(0, 8)
    torch.rand(5)
    assert read(step, 8) == whole[step:]


def test_the_order_of_an_epoch_and_its_augmentation_never_change():
    """A run that is resumed with a later version must see what it would have seen."""
    whole = read(0, 4)
    # 23 samples are three batches of six; the fourth begins another epoch
    assert [indices for indices, _ in whole] == [
        [9, 17, 12, 18, 0, 15],
        [3, 20, 8, 13, 6, 1],
        [10, 2, 11, 22, 16, 14],
        [13, 10, 11, 2, 20, 14],
    ]
    assert whole[0][1] == pytest.approx([2.271461, 1.294116, 1.531405, 1.686954, 0.996887, 1.839811], abs=1e-5)


def test_an_epoch_has_no_sample_twice_and_the_next_another_order():
    whole = [index for indices, _ in read(0, 6) for index in indices]
    assert len(set(whole[:18])) == 18
    assert whole[:18] != whole[18:36]


def test_augmentation_differs_from_epoch_to_epoch():
    drawn = [number for _, numbers in read(0, 9) for number in numbers]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (1, 3), (3, 2)])
def test_ranks_and_parts_together_see_what_one_process_sees(ranks, accumulate):
    whole = read(0, 4)
    shares = [read(0, 4, rank=rank, ranks=ranks, accumulate=accumulate) for rank in range(ranks)]
    for step in range(4):
        parts = [share[step * accumulate + part] for share in shares for part in range(accumulate)]
        assert sorted(i for indices, _ in parts for i in indices) == sorted(whole[step][0])
        assert sorted(n for _, numbers in parts for n in numbers) == sorted(whole[step][1])


def test_repeated_augmentation_shows_each_image_again_in_another_form():
    (indices, numbers), *_ = read(0, 1, repeats=3)
    assert sorted(indices) == sorted([indices[0]] * 3 + [indices[3]] * 3)
    assert len(set(numbers)) == 6


def test_workers_make_the_same_batches(one_thread):
    assert read(2, 4, workers=2) == read(2, 4)


def test_reading_leaves_the_random_state_alone():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    numbers = []
    for reads in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        if reads:
            read(0, 2)
        numbers.append(draw())
    assert numbers[0] == numbers[1]


def test_a_corrupt_image_gives_way_to_the_next_and_is_named():
    batches = list(batches_from(0, Numbers(6, corrupt=(2,)), seed=0, batch_size=6, last_step=1))
    assert sorted(batches[0].content[0].tolist()) == [0, 1, 3, 3, 4, 5]
    assert len(batches[0].rejected) == 1
    assert "2.png" in batches[0].rejected[0]


def test_evaluation_leaves_a_corrupt_image_out():
    batches = list(batches_in_order(Numbers(5, corrupt=(0, 1)), batch_size=2))
    assert batches[0].content is None
    assert [index for batch in batches[1:] for index in batch.content[0].tolist()] == [2, 3, 4]
    assert sum(len(batch.rejected) for batch in batches) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_evaluation_sees_every_sample_once_over_all_ranks(ranks):
    seen = [
        index
        for rank in range(ranks)
        for batch in batches_in_order(Numbers(5), batch_size=2, rank=rank, ranks=ranks)
        for index in batch.content[0].tolist()
    ]
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_data_in_which_nothing_can_be_read_ends_with_an_error():
    with pytest.raises(ValueError, match="in a row cannot be used"):
        list(batches_from(0, Numbers(6, corrupt=range(6)), seed=0, batch_size=2, last_step=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"accumulate": 4}, "equal parts"), ({"repeats": 0}, "repeats"), ({"data": Numbers(5)}, "whole batch")],
)
def test_batches_that_do_not_divide_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read(0, 1, **options)


SLOW_READER = """
import os, sys, time
from nalaformer.data import batches_from


class Places:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return os.getpid()


if __name__ == "__main__":
    for batch in batches_from(0, Places(), seed=0, batch_size=2, last_step=50, workers=1):
        print(int(batch.content[0]), flush=True)
        time.sleep(60)
"""


def test_workers_leave_when_their_reader_is_killed(tmp_path):
    script = tmp_path / "reader.py"
    script.write_text(SLOW_READER)
    reader = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(reader.stdout.readline())
    reader.kill()
    reader.wait()
    # the pipe is held by the workers too: it ends with the last of them
    deadline = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not is_running(worker)
    reader.stdout.close()


def is_running(process: int) -> bool:
    try:
        # a process that has ended but was not waited for is a zombie
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
