"""Sequences whose writing is interrupted: nothing is lost, mixed, or made twice."""

import errno
import json
import os
import signal
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from nalaformer.cli import run_app
from research.sequences import Stored, plan_write, stored, write
from research.sequences.__main__ import build_app

pytestmark = pytest.mark.usefixtures("one_thread")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


OPTIONS = {"length": 12}


def make(folder, samples=40, seed=0, **more):
    return write("copying", folder, split="train", samples=samples, seed=seed, options=OPTIONS, **more)


@pytest.fixture
def stopped_after(monkeypatch):
    """Chunks of 8 samples, and a signal that comes after some of them."""
    monkeypatch.setattr(stored, "CHUNK", 8)
    fill = stored._fill
    made = []

    def after(number):
        def stop(name, arguments, folder, start):
            if len(made) == number:
                raise KeyboardInterrupt
            made.append(start)
            return fill(name, arguments, folder, start)

        made.clear()
        monkeypatch.setattr(stored, "_fill", stop)
        return made

    return after


def test_writing_resumes_after_finished_chunks(tmp_path, stopped_after):
    stopped_after(2)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [".writing_train"]
    question = {"split": "train", "samples": 40, "seed": 0, "options": OPTIONS}
    assert plan_write("copying", tmp_path / "parts", **question).endswith("goes on after 2 of 5 pieces")
    # half a number is what a kill may leave
    with (tmp_path / "parts" / ".writing_train" / stored.FINISHED).open("a") as file:
        file.write("3")
    made, told = stopped_after(-1), []
    make(tmp_path / "parts", advance=told.append)
    assert made == [16, 24, 32]
    assert sum(told) == 40
    make(tmp_path / "whole")
    parts, whole = (tmp_path / name / "train" for name in ("parts", "whole"))
    assert sorted(path.name for path in parts.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert all((parts / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["train"]


def test_interrupted_writes_do_not_leak_into_other_data(tmp_path, stopped_after):
    stopped_after(2)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    made = stopped_after(-1)
    make(tmp_path, seed=1)
    assert len(made) == 5
    again = make(tmp_path / "again", seed=1)
    assert all((tmp_path / "train" / path.name).read_bytes() == path.read_bytes() for path in again.iterdir())


def test_stored_sequences_are_not_made_again_and_others_raise(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setattr(stored, "_fill", lambda *_: pytest.fail("was made again"))
    told = []
    make(tmp_path, advance=told.append)
    assert told == [40]
    with pytest.raises(ValueError, match="must not exist"):
        make(tmp_path, seed=1)


def test_room_for_sequences_is_taken_before_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(stored.os, "posix_fallocate", full, raising=False)
    monkeypatch.setattr(stored, "_fill", lambda *_: pytest.fail("was made"))
    with pytest.raises(OSError, match="the disk is full"):
        make(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_invalid_split_raises_before_another_is_made(tmp_path, monkeypatch):
    make(tmp_path)
    (tmp_path / "train").rename(tmp_path / "val")
    monkeypatch.setattr(stored, "_fill", lambda *_: pytest.fail("was made"))
    with pytest.raises(ValueError, match="val must not exist"):
        CliRunner().invoke(build_app(), ["copying", "--out", str(tmp_path), "--samples", "9"], catch_exceptions=False)


def test_sigterm_keeps_finished_chunks_and_the_same_command_resumes(tmp_path, monkeypatch, stopped_after):
    made = stopped_after(-1)
    fill = stored._fill

    def terminate(*arguments):
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return fill(*arguments)

    monkeypatch.setattr(stored, "_fill", terminate)
    command = ["sequences", "copying", "--out", str(tmp_path), "--samples", "40", "--val-samples", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--test-samples", "0", "--options", json.dumps(OPTIONS)])
    with pytest.raises(SystemExit) as stopped:
        run_app(build_app, "python -m research.sequences")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == [".writing_train"]
    monkeypatch.setattr(stored, "_fill", fill)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            run_app(build_app, "python -m research.sequences")
        assert not ended.value.code
    # five chunks of train and one of val, none of them twice
    assert made == [0, 8, 16, 24, 32, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "val"]


def test_unfinished_stored_sequences_are_not_read(tmp_path, stopped_after):
    stopped_after(2)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path)
    with pytest.raises(ValueError, match="has none"):
        Stored(tmp_path, split="train")
    assert np.load(tmp_path / ".writing_train" / "inputs.npy", mmap_mode="r").shape[0] == 40
