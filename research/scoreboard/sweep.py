"""One timed part of a sweep of the scoreboard, for a GPU that is lent for minutes.

What `python -m research.scoreboard run` does, with three things around it. NVIDIA's multi-process service lets the kernels of
small runs share the GPU; where it does not start, processes alternate, and fewer of them run. With --out the rows and the
runs that are put aside lie there from the first one on, so that a machine that is taken away loses what is under way and no
more. With --pack-kernels the compiled kernels are packed there too, so that the next machine compiles nothing. The same
command resumes where the last one stopped, on another machine if --folder holds what --out had.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
CONTROL = "nvidia-cuda-mps-control"
PLACES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
KERNELS = "kernels.tar.gz"
TABLE = "scoreboard_h200.csv"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[bool]:
    """Yield True if processes that start meanwhile share the GPU through the multi-process service."""
    with tempfile.TemporaryDirectory() as folder:
        places = {name: f"{folder}/{name}" for name in PLACES}
        for place in places.values():
            os.mkdir(place)
        if not wanted or shutil.which(CONTROL) is None:
            say(f"no multi-process service: {'not wanted' if not wanted else CONTROL + ' is missing'}")
            yield False
            return
        os.environ |= places
        try:
            works = answers([CONTROL, "-d"]) and answers([sys.executable, __file__, "--probe"])
            say("multi-process service: " + ("on" if works else "does not work here"))
            if not works:
                # a service that half works would reject every process
                end_service()
            yield works
        finally:
            if PLACES[0] in os.environ:
                end_service()


def end_service() -> None:
    try:
        # not for ever: this process has used the GPU too, and is a client that stays
        subprocess.run([CONTROL], input="quit -t 1\n", text=True, check=False, timeout=4)
    except subprocess.TimeoutExpired:
        say("the multi-process service did not end within 4 seconds")
    for name in PLACES:
        del os.environ[name]


def answers(command: list[str]) -> bool:
    """Return True if a command succeeds within 30 seconds."""
    try:
        # its output goes nowhere: a daemon would hold a pipe open
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def bring(source: Path, target: Path) -> None:
    """The rows of a folder, and the runs that it has put aside, into another one, unless that one's rows are newer."""
    target.mkdir(parents=True, exist_ok=True)
    old, new = target / TABLE, source / TABLE
    # a sweep that was killed has left its last rows in one of the two alone
    if source == target or (old.exists() and not (new.exists() and new.stat().st_mtime_ns > old.stat().st_mtime_ns)):
        return
    if new.exists():
        shutil.copy(new, target)
    aside = f".{Path(TABLE).stem}_aside"
    shutil.rmtree(target / aside, ignore_errors=True)
    if (source / aside).exists():
        shutil.copytree(source / aside, target / aside)


def probe() -> int:
    """0 if the driver gives this process a context on the GPU, which takes a fraction of the time that importing torch does."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    steps = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        lambda: driver.cuCtxSetCurrent(context),
        lambda: driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)),
    )
    return next((result for step in steps if (result := step())), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="pointing_256,mqar_80,majority_256", help="by comma, the most important first")
    parser.add_argument("--methods", default="all", help="as `python -m research.scoreboard run --methods` takes them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--jobs", type=int, default=14, help="runs at a time where they share the GPU")
    parser.add_argument("--jobs-in-turns", type=int, default=6, help="and where they do not")
    parser.add_argument("--no-service", action="store_true", help="do not try the multi-process service")
    parser.add_argument("--images", default="", help=".npz file of the rows of images")
    parser.add_argument("--texts", default="", help=".jsonl.gz file of the row of texts")
    parser.add_argument("--rates", default="", help="by comma; without them those of the rows")
    parser.add_argument("--compile", action="store_true", help="give the steps to torch.compile")
    parser.add_argument("--data-folder", type=Path, default=None, help="where data that takes minutes to make is kept")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that make it")
    parser.add_argument("--folder", type=Path, default=PROJECT / "runs" / "scoreboard", help="what the next call goes on from")
    parser.add_argument("--out", type=Path, default=None, help="folder that gets the results as they come; else --folder")
    parser.add_argument("--pack-kernels", action="store_true", help="and the compiled kernels, for the next machine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="two steps of the smallest form of each row")
    asked = parser.parse_args()
    began = time.monotonic()
    asked.folder.mkdir(parents=True, exist_ok=True)
    kernels = asked.folder / "kernels"
    os.environ.setdefault("TRITON_CACHE_DIR", str(kernels))
    if (asked.folder / KERNELS).exists() and not kernels.exists():
        with tarfile.open(asked.folder / KERNELS) as packed:
            # Python before 3.11.4 has no filters
            packed.extraction_filter = getattr(tarfile, "data_filter", None)
            packed.extractall(kernels)
    with shared_gpu(asked.device == "cuda" and not asked.no_service) as is_shared:
        from research.scoreboard import METHODS_OF_THE_BOARD, ROWS, make_board, run_boards
        from research.scoreboard.methods import methods_for

        boards = []
        for name in asked.rows.split(","):
            option, file = ROWS[name].file_option, asked.texts if name == "manuals" else asked.images
            settings = [f'data_options={{"{option}": "{file}"}}'] if option else []
            settings += ["compile=true"] if asked.compile else []
            # some methods fit only causal rows, others only bidirectional ones: each row takes its own
            here = methods_for(causal=ROWS[name].is_causal)
            known = {short: method in here for short, method in METHODS_OF_THE_BOARD.items()}
            methods = asked.methods
            if "{" not in methods:
                methods = ",".join(each for each in methods.split(",") if known.get(each.strip(), True))
            given: dict[str, Any] = {"methods": methods, "seeds": asked.seeds, "smoke": asked.smoke}
            rates = [float(rate) for rate in asked.rates.split(",") if rate]
            boards.append(make_board(name, settings=settings, learning_rates=rates, **given))
        place = asked.folder if asked.out is None else asked.out
        bring(asked.folder, place)
        failure = ""
        try:
            run_boards(
                boards,
                out=place / TABLE,
                device=asked.device,
                seconds=60 * asked.minutes - (time.monotonic() - began),
                jobs=asked.jobs if is_shared else asked.jobs_in_turns,
                data_folder=asked.data_folder,
                workers=asked.workers,
                say=lambda line: say(f"{time.monotonic() - began:6.1f} s  {line}"),
            )
        except RuntimeError as error:
            failure = str(error)
        finally:
            bring(place, asked.folder)
            if asked.out is not None and asked.pack_kernels and kernels.exists():
                with tarfile.open(asked.out / KERNELS, "w:gz") as packed:
                    packed.add(kernels, arcname=".")
    say(f"{time.monotonic() - began:6.1f} s in all")
    if failure:
        say(failure)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(probe() if sys.argv[1:] == ["--probe"] else main())
