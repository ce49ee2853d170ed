"""Run the numeric tests with many seeds and print every bar with less than a factor of three of room.

A comment above a bar that begins with `# room:` says why it needs no more; such bars are listed apart.

    python tests/run_seeds.py --seeds 1-20 --workers 16 --out runs/seeds [--time-limit 900] [tests/test_x.py ...]
    python tests/run_seeds.py --table runs/seeds

Rows are appended after each test, so what an interrupted run measured is in the table. Exits with 1 if any test failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from helpers.places import ALL_TESTS, PROJECT

# a bar that passes by less than this on one machine fails on the next
ROOM = 3
# these check files, texts, messages and times, or data that a fixed seed defines: other seeds tell nothing about a bar
WITHOUT_BARS = {
    *("test_cli", "test_cli_train", "test_docs", "test_errors", "test_many_seeds", "test_scoreboard", "test_tasks"),
    "test_captured_training",
    *("test_data", "test_image_files", "test_loading", "test_sequence_data", "test_stored_sequences", "test_text_data"),
    *("test_listops", "test_pathfinder", "test_recall_data"),
    *("test_gpu", "test_language_gpu", "test_stepping_gpu", "test_fast_training_gpu"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seed_range, default=range(1, 21), help="first-last")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="test processes at a time, of one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="folder of the results; emptied first")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no more tests run")
    parser.add_argument("--table", type=Path, help="only print the table of this folder")
    parser.add_argument("files", nargs="*", help="test files, or file.py::test; without any: all that have bars")
    given = parser.parse_args()
    if given.table is None:
        files = given.files or [str(path) for path in test_files() if path.stem not in WITHOUT_BARS]
        shutil.rmtree(given.out, ignore_errors=True)
        given.out.mkdir(parents=True)
        jobs = [(seed, file) for seed in given.seeds for file in files]
        run(jobs, given.out, given.workers, time.monotonic() + given.time_limit)
    return table(given.table or given.out)


def test_files() -> list[Path]:
    return sorted(path for folder in ALL_TESTS for path in folder.rglob("test_*.py"))


def seed_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def run(jobs: list[tuple[int, str]], out: Path, workers: int, end: float) -> None:
    """One process for each seed and file, seed after seed, so that a run that ends early has whole seeds."""
    # bytecode of its own: that of an ordinary run lacks the hook that sees asserts which hold
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str((out / "bytecode").resolve())}
    options = ["-m", "not slow and not gpu", "-p", "no:cacheprovider", "-o", "enable_assertion_pass_hook=true", "--tb=no"]

    running: set[subprocess.Popen] = set()

    def one(number: int, seed: int, file: str) -> None:
        if time.monotonic() > end:
            return
        name = f"{number:05}_{Path(file.partition('::')[0]).stem}_{seed}"
        command = [sys.executable, "-m", "pytest", *options, "--seed", str(seed), "--room", str(out / f"{name}.jsonl"), file]
        with (out / f"{name}.log").open("w") as log:
            process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=log, stderr=log)
            running.add(process)
            status = process.wait()
            running.discard(process)
        # 0 passed, 1 failures (the rows have them), 5 nothing collected, negative stopped by us; else the file did not run
        if status > 1 and status != 5:
            row = {"seed": seed, "test": file, "failed": f"pytest ended with {status}, see {log.name}"}
            (out / f"{name}_broken.jsonl").write_text(json.dumps(row) + "\n")
        word = {0: "passed", 5: "no tests"}.get(status, "stopped" if status < 0 else "failed")
        print(f"seed {seed} {file}: {word}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ThreadPoolExecutor(workers)
    waiting = [pool.submit(one, number, *job) for number, job in enumerate(jobs)]
    try:
        wait(waiting, timeout=None if end == float("inf") else max(0.0, end - time.monotonic()))
    except KeyboardInterrupt:
        print("interrupted: the table has what was measured so far")
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list(running):
        process.terminate()
    pool.shutdown()


def table(folder: Path) -> int:
    """Every bar with too little room, worst first, then every test that failed."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines() if line]
    failures = [row for row in rows if "failed" in row]
    worst: dict[str, dict] = {}
    for row in rows:
        # a ratio that is no number is larger than any
        if "at" in row and (row["at"] not in worst or not row["ratio"] <= worst[row["at"]]["ratio"]):
            worst[row["at"]] = row
    tight = sorted((row for row in worst.values() if not row["ratio"] <= 1 / ROOM), key=lambda row: -row["ratio"])
    argued = [row for row in tight if is_argued(row["at"])]
    open_questions = [row for row in tight if row not in argued]
    print(f"{len({row['seed'] for row in rows})} seeds, {len(worst)} bars")
    print_bars(f"less than a factor of {ROOM} of room", open_questions)
    print_bars(f"less than a factor of {ROOM} of room, argued beside the bar", argued)
    if failures:
        print(f"{len(failures)} failed:")
    for row in failures:
        print(f"seed {row['seed']}  {row['test']}: {' '.join(row['failed'].split())[:160]}")
    return 1 if failures else 0


def print_bars(heading: str, rows: list[dict]) -> None:
    print(f"{len(rows)} with {heading}" + (":\nerror/bar  error     bar       seed  line, test" if rows else ""))
    for row in rows:
        line = f"{row['ratio']:9.2f}  {row['error']:.2e}  {row['bar']:.2e}  {row['seed']:4}"
        print(f"{line}  {row['at']} {row['test'].partition('::')[2]}")


def is_argued(place: str) -> bool:
    """Whether a comment directly above the line begins with `# room:` and says why less is enough."""
    name, _, number = place.partition(":")
    lines = (PROJECT / name).read_text().splitlines()[: int(number) - 1]
    for line in reversed(lines):
        if not line.strip().startswith("#"):
            return False
        if line.strip().startswith("# room:"):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
