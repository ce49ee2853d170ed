"""Generated data on the disk, with several processes that want it at once."""

import multiprocessing
import threading

import pytest

from nalaformer.data.generated_folders import written_once


def test_a_process_waits_for_the_one_that_writes_and_takes_its_data(tmp_path):
    context = multiprocessing.get_context("fork")
    is_writing, may_end = context.Event(), context.Event()

    def write(folder):
        (folder / "theirs").touch()
        is_writing.set()
        may_end.wait(60)

    other = context.Process(target=written_once, args=(tmp_path / "set", write))
    other.start()
    assert is_writing.wait(60)
    threading.Timer(0.3, may_end.set).start()
    found = written_once(tmp_path / "set", lambda folder: pytest.fail("written twice"))
    assert [path.name for path in found.iterdir()] == ["theirs"]
    other.join(60)
    assert other.exitcode == 0
