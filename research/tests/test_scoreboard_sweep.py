"""A timed part of a sweep: it resumes where it stopped, and shares the GPU only where that works."""

import importlib.util
import os
import sys
import tarfile
from pathlib import Path

import pytest

from research.scoreboard.report import read_rows

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).parents[1] / "scoreboard" / "sweep.py"
PLACE = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    spec = importlib.util.spec_from_file_location("scoreboard_sweep", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    os.environ.pop("TRITON_CACHE_DIR", None)


def call(sweep, monkeypatch, folder, *arguments):
    usual = ["--device", "cpu", "--smoke", "--rows", "copying_256", "--jobs-in-turns", "1", "--folder", str(folder / "kept")]
    monkeypatch.setattr(sys, "argv", ["sweep", *usual, "--out", str(folder / "out"), *arguments])
    return sweep.main()


def test_a_sweep_leaves_its_rows_and_kernels_and_the_next_call_resumes(sweep, monkeypatch, tmp_path, capsys):
    (tmp_path / "kept" / "kernels").mkdir(parents=True)
    (tmp_path / "kept" / "kernels" / "one.cubin").write_bytes(b"kernel")
    assert call(sweep, monkeypatch, tmp_path, "--methods", "relu", "--pack-kernels") == 0
    assert [row["method"] for row in read_rows(tmp_path / "out" / "scoreboard_h200.csv")] == ["relu"]
    with tarfile.open(tmp_path / "out" / "kernels.tar.gz") as packed:
        assert "./one.cubin" in packed.getnames()
    assert call(sweep, monkeypatch, tmp_path, "--methods", "relu, elu") == 0
    assert [row["method"] for row in read_rows(tmp_path / "out" / "scoreboard_h200.csv")] == ["relu", "elu"]
    assert "copying_256: 1 of 2 runs to do" in capsys.readouterr().out


def test_rows_and_saved_runs_reach_the_results_folder_at_once(sweep, monkeypatch, tmp_path):
    aside = ".scoreboard_h200_aside"
    kept, out = tmp_path / "kept", tmp_path / "out"
    (kept / aside).mkdir(parents=True)
    (kept / aside / "one.safetensors").write_bytes(b"a run")
    seen = []

    def taken_away(boards, *, out, **given):
        seen.append((out, sorted(path.name for path in (out.parent / aside).iterdir())))
        out.write_text("a row\n")
        (out.parent / aside / "one.safetensors").unlink()
        (out.parent / aside / "two.safetensors").write_bytes(b"another")
        raise KeyboardInterrupt

    monkeypatch.setattr("research.scoreboard.run_boards", taken_away)
    with pytest.raises(KeyboardInterrupt):
        call(sweep, monkeypatch, tmp_path, "--methods", "relu")
    assert seen == [(out / "scoreboard_h200.csv", ["one.safetensors"])]
    # the next call resumes from these
    assert (kept / "scoreboard_h200.csv").read_text() == "a row\n"
    assert [path.name for path in (kept / aside).iterdir()] == ["two.safetensors"]


def test_older_rows_do_not_overwrite_those_from_a_killed_sweep(sweep, monkeypatch, tmp_path, capsys):
    kept, out = (tmp_path / name / "scoreboard_h200.csv" for name in ("kept", "out"))
    assert call(sweep, monkeypatch, tmp_path, "--methods", "relu") == 0
    before = kept.read_bytes()
    assert call(sweep, monkeypatch, tmp_path, "--methods", "relu, elu") == 0
    # as a kill leaves it: nothing was brought back
    kept.write_bytes(before)
    os.utime(kept, ns=(out.stat().st_mtime_ns - 10**9,) * 2)
    capsys.readouterr()
    assert call(sweep, monkeypatch, tmp_path, "--methods", "relu, elu") == 0
    assert "copying_256: 0 of 2 runs to do" in capsys.readouterr().out
    assert [row["method"] for row in read_rows(kept)] == [row["method"] for row in read_rows(out)] == ["relu", "elu"]


def test_a_row_takes_the_methods_that_it_can_train(sweep, monkeypatch, tmp_path):
    more = ("--rows", "copying_256,majority_256", "--methods", "relu,rala_map,deltanet")
    assert call(sweep, monkeypatch, tmp_path, *more) == 0
    found = {(row["task"], row["method"].split()[0]) for row in read_rows(tmp_path / "out" / "scoreboard_h200.csv")}
    own = {("copying_256", "delta"), ("majority_256", "rala")}
    assert found == {("copying_256", "relu"), ("majority_256", "relu")} | own
    assert not (tmp_path / "out" / "kernels.tar.gz").exists()


def test_kernels_from_another_machine_are_unpacked(sweep, monkeypatch, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "one.cubin").write_bytes(b"kernel")
    with tarfile.open(tmp_path / "kept" / "kernels.tar.gz", "w:gz") as packed:
        packed.add(tmp_path / "one.cubin", arcname="./one.cubin")
    assert call(sweep, monkeypatch, tmp_path, "--methods", "relu") == 0
    assert (tmp_path / "kept" / "kernels" / "one.cubin").read_bytes() == b"kernel"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "kept" / "kernels")


@pytest.fixture
def control(sweep, monkeypatch, tmp_path):
    """A service that starts, and notes what it is told."""
    told = tmp_path / "told"
    program = tmp_path / sweep.CONTROL
    program.write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo started >> "{told}" || cat >> "{told}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return told


def test_processes_share_the_gpu_where_the_service_gives_them_one(sweep, monkeypatch, control):
    answers = sweep.answers
    monkeypatch.setattr(sweep, "answers", lambda command: "--probe" in command or answers(command))
    with sweep.shared_gpu(True) as is_shared:
        assert is_shared
        assert Path(os.environ[PLACE]).is_dir()
    assert control.read_text().split() == ["started", "quit", "-t", "1"]


def test_a_service_without_a_gpu_is_ended_and_skipped(sweep, monkeypatch, control):
    answers = sweep.answers
    monkeypatch.setattr(sweep, "answers", lambda command: "--probe" not in command and answers(command))
    with sweep.shared_gpu(True) as is_shared:
        assert not is_shared
        assert PLACE not in os.environ
    assert control.read_text().split() == ["started", "quit", "-t", "1"]


def test_no_service_is_started_where_none_is_wanted(sweep, control):
    with sweep.shared_gpu(False) as is_shared:
        assert not is_shared
        assert PLACE not in os.environ
    assert not control.exists()


def test_a_command_that_fails_or_is_missing_does_not_answer(sweep):
    assert sweep.answers([sys.executable, "-c", ""])
    assert not sweep.answers([sys.executable, "-c", "raise SystemExit(3)"])
    assert not sweep.answers(["no-such-command"])
