"""Work that is interrupted, done twice at once, or meets a full disk: nothing is lost, mixed, or left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers.training_example import Points, Regression, make_model, make_trainer
from nalaformer import atomic_files, folder_lock
from nalaformer.atomic_files import atomic_folder, is_full_disk, write_atomically
from nalaformer.data.text import tokenize_corpus
from nalaformer.folder_lock import InUse, is_running, only_writer, process_start
from nalaformer.stopping import clean_exit, stop_requests
from nalaformer.training import Checkpoints, plan, plan_lines
from nalaformer.training.log import RunLog, read_log

pytestmark = pytest.mark.usefixtures("one_thread")


def held_by(folder, **changes):
    """A lock's file as a process leaves it that was killed."""
    holder = {"host": folder_lock.socket.gethostname(), "pid": os.getpid(), "started": "0", "since": "2026-01-01"} | changes
    (folder / ".lock").write_text(json.dumps(holder))
    return folder / ".lock"


# ---- one writer


def test_a_second_writer_is_refused_with_host_and_pid(tmp_path):
    with only_writer(tmp_path / "run"):
        refused = rf"written by process {os.getpid()} on {folder_lock.socket.gethostname()} .*choose another folder"
        with pytest.raises(InUse, match=refused), only_writer(tmp_path / "run"):
            pass
    with only_writer(tmp_path / "run"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_a_run_that_another_process_trains_is_refused_and_left_alone(tmp_path):
    with only_writer(tmp_path), pytest.raises(InUse, match="written by process"):
        make_trainer(tmp_path, learning_rate=1e-3).fit()
    assert not (tmp_path / "log.jsonl").exists()
    with only_writer(tmp_path), pytest.raises(InUse):
        plan_lines(make_trainer(tmp_path))


HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from folder_lock import only_writer

with only_writer(sys.argv[2]):
    print("in", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path):
    (tmp_path / "program.py").write_text(HOLDER)
    run = tmp_path / "run"
    with light_process(tmp_path / "program.py", run) as process:
        process.stdout.readline()
        with pytest.raises(InUse, match=f"process {process.pid} on"), only_writer(run):
            pass
        process.kill()
    assert (run / ".lock").exists()
    with only_writer(run):
        assert json.loads((run / ".lock").read_text())["pid"] == os.getpid()


def test_the_lock_of_another_host_is_refused_with_the_file_to_remove(tmp_path):
    lock = held_by(tmp_path, host="elsewhere", pid=1)
    refused = r"process 1 on the host elsewhere .* if it has ended, remove .*\.lock"
    with pytest.raises(InUse, match=refused), only_writer(tmp_path):
        pass
    lock.unlink()
    with only_writer(tmp_path):
        pass


@pytest.mark.parametrize(("started", "is_refused"), [("", True), ("0", False)], ids=["the same process", "a later one"])
def test_where_files_cannot_be_locked_the_pid_and_its_start_decide(tmp_path, monkeypatch, started, is_refused):
    monkeypatch.setattr(folder_lock, "_try_lock", lambda descriptor: None)
    # this process runs; one that started at another moment under its pid is gone
    held_by(tmp_path, started=started and "another moment")
    if is_refused:
        with pytest.raises(InUse), only_writer(tmp_path):
            pass
    else:
        with only_writer(tmp_path):
            pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the start of a process is known from /proc")
def test_a_process_is_known_by_its_pid_and_start():
    assert is_running(os.getpid(), process_start(os.getpid()))
    assert not is_running(os.getpid(), process_start(1))


def test_a_lock_without_a_name_in_it_is_no_obstacle(tmp_path):
    (tmp_path / ".lock").touch()
    with only_writer(tmp_path):
        pass


# ---- saved by time, and when asked to stop


@pytest.fixture
def a_clock(monkeypatch):
    """A clock of which every look takes a minute."""
    now = iter(range(0, 10**9, 60))
    monkeypatch.setattr("nalaformer.training.trainer.time.monotonic", lambda: next(now))


def saved_steps(monkeypatch):
    found = []
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, content: (found.append(step), save(self, step, content))[1])
    return found


@pytest.mark.parametrize(("minutes", "steps"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (0, [6])])
def test_checkpoints_are_written_by_time(tmp_path, monkeypatch, a_clock, minutes, steps):
    saved = saved_steps(monkeypatch)
    make_trainer(tmp_path, steps=6, save_every=0, eval_every=0, save_minutes=minutes).fit()
    # a look at the clock after every step, one after every save
    assert saved == steps


def interrupt_at(trainer, step, number=signal.SIGINT, times=1):
    """Send this process a signal in the course of that step."""
    loss = trainer.task.loss

    def counted(model, batch):
        if trainer.progress.step == step - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return loss(model, batch)

    trainer.task.loss = counted
    return trainer


def test_ctrl_c_saves_the_step_in_progress_and_the_run_goes_on_to_the_same_bits(tmp_path):
    whole, halves = make_model(), make_model()
    quiet = {"steps": 8, "save_every": 0, "eval_every": 0}
    make_trainer(tmp_path / "whole", model=whole, **quiet).fit()
    with pytest.raises(KeyboardInterrupt):
        interrupt_at(make_trainer(tmp_path / "halves", model=make_model(), **quiet), 3).fit()
    assert Checkpoints(tmp_path / "halves" / "checkpoints").steps() == [3]
    assert make_trainer(tmp_path / "halves", model=halves, **quiet).fit().is_finished
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), halves.state_dict().values(), strict=True))


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupt_at(make_trainer(tmp_path, steps=8, save_every=0, eval_every=0), 3, times=2).fit()
    assert Checkpoints(tmp_path / "checkpoints").steps() == []
    # nothing is locked behind it, and signals are what they were
    assert not (tmp_path / ".lock").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_any_number_of_times_saves_and_ends_without_an_exception(tmp_path):
    trainer = interrupt_at(make_trainer(tmp_path, steps=8, save_every=0, eval_every=0), 3, signal.SIGTERM, times=3)
    assert trainer.fit().step == 3
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests(lambda: pytest.fail("was asked")):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- another model, other data


def test_a_run_of_another_model_is_refused_by_the_name_of_what_differs(tmp_path):
    make_trainer(tmp_path, steps=2).fit()
    with pytest.raises(ValueError, match=r"run of another model: 1\.bias is \[16\] there and absent here; choose another"):
        make_trainer(tmp_path, steps=2, model=make_model(norm=False)).fit()


def test_a_run_on_more_data_is_refused(tmp_path):
    make_trainer(tmp_path, steps=2).fit()
    more = Regression()
    more.train_data = Points(61)
    with pytest.raises(ValueError, match="made from something else: samples was 60 and is now 61"):
        make_trainer(tmp_path, steps=2, task=more).fit()


def test_a_run_of_a_version_that_noted_no_origin_goes_on(tmp_path):
    make_trainer(tmp_path, steps=2, save_every=1, keep=3).fit()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in checkpoints.steps():
        old = checkpoints.load(step)
        del old.state["made_from"]
        checkpoints.save(step, old)
    assert make_trainer(tmp_path, steps=2, save_every=1, keep=3).fit().is_finished


# ---- the log


ROWS = [{"kind": "step", "step": step, "loss": 1.0} for step in range(1, 6)]


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b'{"kind": "st', b"5", b'{"loss": 1}', b'{"kind": "step", "step": "3"}', b"[" * 100_000, b""]
)
def test_a_damaged_line_of_the_log_costs_no_other(tmp_path, bad):
    lines = [json.dumps(row).encode() for row in ROWS]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*lines[:2], bad, *lines[2:]]) + b"\n")
    assert read_log(tmp_path / "log.jsonl") == ROWS
    with pytest.warns(UserWarning, match="1 of its lines .* line 3"):
        RunLog(tmp_path, after_step=4, tensorboard=False).close()
    assert read_log(tmp_path / "log.jsonl") == ROWS[:4]


# ---- a full disk


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_file_beside_the_one_that_was_to_be_written(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a.json", b"old")
    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.json could not be written, the disk is full"):
        write_atomically(tmp_path / "a.json", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.json", b"old")]


def half_written(path, then):
    with atomic_folder(path) as folder:
        (folder / "half").touch()
        then()


def test_a_full_disk_under_a_folder_says_what_to_do_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"out could not be written, the disk is full; make room there"):
        half_written(tmp_path / "out", full)
    assert not list(tmp_path.iterdir())


def test_every_writer_s_word_for_a_full_disk_is_known(tmp_path):
    error = type("SafetensorError", (Exception,), {})
    assert is_full_disk(OSError(errno.EDQUOT, "quota"))
    assert is_full_disk(OSError("1000 requested and 12 written"))
    assert is_full_disk(error("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert is_full_disk(error('Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "full" })'))
    assert not is_full_disk(error("Error while deserializing header: header too large"))
    assert not is_full_disk(OSError(errno.EACCES, "denied"))
    assert not is_full_disk(ValueError("code: 28"))


def test_a_run_that_cannot_fit_is_refused_before_its_first_step(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "run", steps=2)
    needed = 2 * plan.checkpoint_bytes(trainer)
    monkeypatch.setattr(atomic_files, "free_bytes", lambda folder: needed - 1)
    with pytest.raises(ValueError, match=r"a run needs about .* make room, or choose a folder on another disk"):
        trainer.fit()
    monkeypatch.setattr(atomic_files, "free_bytes", lambda folder: needed)
    assert trainer.fit().is_finished


# ---- the plan


def test_the_plan_of_a_run_says_where_it_stands_and_writes_nothing(tmp_path):
    def first_line():
        return plan_lines(make_trainer(tmp_path / "run", steps=4, save_every=0, eval_every=0))[0]

    assert first_line() == "training: 4 steps of 12, 5 an epoch; new"
    assert not (tmp_path / "run").exists()
    with pytest.raises(KeyboardInterrupt):
        interrupt_at(make_trainer(tmp_path / "run", steps=4, save_every=0, eval_every=0), 2).fit()
    assert first_line().endswith("goes on after step 2")
    make_trainer(tmp_path / "run", steps=4, save_every=0, eval_every=0).fit()
    assert first_line().endswith("finished")
    with pytest.raises(ValueError, match="other settings"):
        plan_lines(make_trainer(tmp_path / "run", steps=5, save_every=0, eval_every=0))


# ---- folders that appear when they are whole


def test_two_writers_of_a_whole_folder_do_not_meet(tmp_path):
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("first")
        with pytest.raises(InUse), atomic_folder(tmp_path / "out"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "a").read_text() == "first"


def test_what_a_killed_writer_has_left_is_removed_by_the_next(tmp_path):
    left = atomic_files.unfinished_folder(tmp_path / "out")
    left.mkdir()
    (left / "half").touch()
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]


def test_sigterm_in_a_command_removes_what_is_half_written(tmp_path):
    with pytest.raises(SystemExit) as stopped, clean_exit():
        half_written(tmp_path / "out", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_that_cannot_be_is_refused_before_the_text_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setattr("nalaformer.data.text.corpus.read_documents", lambda *_: pytest.fail("was read"))
    with pytest.raises(ValueError, match="vocab_size must exceed 256"):
        tokenize_corpus([tmp_path / "a.txt"], tmp_path / "out", train_vocab=10)
    monkeypatch.setattr(atomic_files, "free_bytes", lambda folder: 2)
    with pytest.raises(ValueError, match="a corpus needs about"):
        tokenize_corpus([tmp_path / "a.txt"], tmp_path / "out", train_vocab=300)


# ---- workers


POOL = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from child_processes import worker_pool
from stopping import clean_exit

if __name__ == "__main__":
    with clean_exit(), worker_pool(2) as pool:
        pids = {pool.submit(os.getpid).result()}
        jobs = [pool.submit(time.sleep, 600) for _ in range(4)]
        while len(pool._processes) < 2:
            time.sleep(0.01)
        print(*pool._processes, flush=True)
        jobs[0].result()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_workers_end_with_the_process_that_they_work_for(tmp_path, number):
    (tmp_path / "program.py").write_text(POOL)
    with light_process(tmp_path / "program.py") as process:
        workers = [(int(pid), process_start(int(pid))) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 60
    while any(is_running(pid, started) for pid, started in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid, started in workers if is_running(pid, started)]


@pytest.mark.parametrize("name", ["short", "a_folder_with_a_long_name_" * 6])
def test_workers_start_whatever_the_temporary_folder_is_called(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    (tmp_path / "program.py").write_text(POOL)
    with light_process(tmp_path / "program.py") as process:
        assert len(process.stdout.readline().split()) == 2
        process.terminate()


def light_process(program, *arguments):
    """A Python process that finds the modules of the package without its __init__, which would import torch."""
    command = [sys.executable, str(program), str(Path(folder_lock.__file__).parent), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
