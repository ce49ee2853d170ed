"""Whoever writes a file or folder and renames it: it reaches the disk before it has its name, and its name reaches it too."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nalaformer import atomic_files, published
from nalaformer.atomic_files import atomic_file, atomic_folder, put_in_place, write_atomically, write_csv
from nalaformer.charts import new_figure, save_figure
from nalaformer.training import Checkpoint, Checkpoints


def write_folder(path):
    with atomic_folder(path) as folder:
        (folder / "a").write_bytes(b"new")


def write_checkpoint(path):
    Checkpoints(path.parent).save(7, Checkpoint(tensors={}, state={}))


def write_published(path):
    weights = path.with_name("source.safetensors")
    save_file({"patch_embed.proj.0.weight": torch.zeros(2)}, weights)
    published.convert_file(weights, path, family="nalaformer")


WRITERS = {
    "file": (write_atomically, "a.json", (b"new",)),
    "table": (write_csv, "a.csv", (("name",), [{"name": "new"}])),
    "folder": (write_folder, "a", ()),
    "checkpoint": (write_checkpoint, "step_00000007", ()),
    "published weights": (write_published, "a.safetensors", ()),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_gets_its_name_has_reached_the_disk(tmp_path, monkeypatch, kind):
    write, name, arguments = WRITERS[kind]
    monkeypatch.setattr(published, "translate", lambda weights, family: dict(weights))
    path, events = tmp_path / name, []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a, **k: (events.append("renamed"), replace(*a, **k)))
    write(path, *arguments)
    renamed = len(events) - events[::-1].index("renamed")
    written = [path, *path.iterdir()] if path.is_dir() else [path]
    assert {each.stat().st_ino for each in written} <= set(events[:renamed])
    assert tmp_path.stat().st_ino in events[renamed:]


def write_half(path):
    with atomic_file(path) as aside:
        aside.write_bytes(b"half")
        raise KeyboardInterrupt


def test_a_file_that_is_not_finished_leaves_the_old_one(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "a")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_a_figure_that_is_not_finished_leaves_the_old_one_and_is_named(tmp_path, monkeypatch):
    figure, path = new_figure(1, 1), tmp_path / "a.png"
    save_figure(figure, path)
    before = path.read_bytes()

    def full(file, **_):
        Path(file).touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(OSError, match=r"a\.png could not be written, the disk is full"):
        save_figure(figure, path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.png", before)]


def test_an_older_folder_goes_only_when_the_new_one_has_reached_the_disk(tmp_path, monkeypatch):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            put_in_place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "old").exists()
    put_in_place(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]


def test_tables_have_the_same_line_ends_on_every_machine(tmp_path):
    write_csv(tmp_path / "a.csv", ("name", "size"), [{"name": "new", "size": 3}])
    assert (tmp_path / "a.csv").read_bytes() == b"name,size\nnew,3\n"
