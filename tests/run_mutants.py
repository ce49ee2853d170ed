"""Plant one bug at a time in the library and see which of them the tests notice.

    python tests/run_mutants.py record --out runs/mutants [--workers 2] [tests/data ...]
    python tests/run_mutants.py plant --out runs/mutants --count 200 --seed 0 [--rooms tasks,data] [--workers 2]
    python tests/run_mutants.py table --out runs/mutants

`record` runs the tests once and notes which lines each of them executes. `plant` draws lines evenly from those, changes each
by an operator that is drawn too (OPERATORS), and runs the tests that execute the line: the quickest first, then all. A row is
written after each bug, and the same command resumes. `table` prints the share that was noticed and every bug that was not.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
SOURCE = Path("src") / "nalaformer"
# these see most bugs, in seconds
QUICK = 30
# a test that never ends has noticed the bug
SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One change of one line."""

    file: str
    line: int
    operator: str
    before: str
    after: str


# ---- operators: each gives the changed node, or None where it does not apply

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
ARITHMETIC |= {ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "mean": "sum"}
NAMES |= {"floor": "ceil", "ceil": "floor", "argmax": "argmin", "argmin": "argmax", "exp": "exp2", "log": "log2"}
NAMES |= {"sin": "cos", "cos": "sin", "round": "int", "clamp_min": "clamp_max", "zeros": "ones", "zeros_like": "ones_like"}


def change_comparison(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
        return node
    return None


def change_arithmetic(node: ast.AST) -> ast.AST | None:
    # a type such as int | None is no arithmetic
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        node.op = ARITHMETIC[type(node.op)]()
        return node
    return None


def change_number(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = node.value + 1 if isinstance(node.value, int) or node.value == 0 else node.value * 2
        return node
    return None


def flip_bool(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
        return node
    return None


def negate_condition(node: ast.AST) -> ast.AST | None:
    if getattr(node, "is_condition", False):
        return ast.UnaryOp(op=ast.Not(), operand=node)
    return None


def change_logic(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    return None


def change_function(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name) and called.id in NAMES:
            called.id = NAMES[called.id]
            return node
        if isinstance(called, ast.Attribute) and called.attr in NAMES:
            called.attr = NAMES[called.attr]
            return node
    return None


def drop_statement(node: ast.AST) -> ast.AST | None:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.AugAssign | ast.Expr | ast.Continue | ast.Break) and not is_docstring:
        return ast.copy_location(ast.Pass(), node)
    return None


def drop_argument(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg is not None:
        node.keywords.pop()
        return node
    return None


OPERATORS: dict[str, Callable[[ast.AST], ast.AST | None]] = {
    "comparison": change_comparison,
    "arithmetic": change_arithmetic,
    "number": change_number,
    "bool": flip_bool,
    "condition": negate_condition,
    "logic": change_logic,
    "function": change_function,
    "statement": drop_statement,
    "argument": drop_argument,
}


def is_code(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes whose change changes what is computed: no annotations, messages of errors, docstrings and decorators."""
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            parts = [node.returns, *node.decorator_list, *arguments]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise | ast.JoinedStr):
            parts = [node]
        for part in parts:
            if part is not None:
                left_out.update(ast.walk(part))
    return set(ast.walk(tree)) - left_out


def bugs_of(file: str, line: int) -> list[tuple[Bug, str]]:
    """Return every bug that the operators make of one line, with the text of the changed file."""
    text = (PROJECT / SOURCE / file).read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            node.test.is_condition = True  # type: ignore[attr-defined]
    places = [node for node in is_code(tree) if getattr(node, "lineno", None) == line]
    places.sort(key=lambda node: (node.col_offset, node.end_col_offset, type(node).__name__))
    found = []
    for node in places:
        for name, operator in OPERATORS.items():
            changed = operator(deepcopy(node))
            if changed is None:
                continue
            before, after = ast.unparse(node), ast.unparse(ast.fix_missing_locations(changed))
            is_operand = isinstance(changed, ast.expr) and not isinstance(changed, ast.Constant | ast.Call)
            whole = put(text, node, f"({after})" if is_operand else after)
            found.append((Bug(file=file, line=line, operator=name, before=first(before), after=first(after)), whole))
    return found


def put(text: str, node: ast.AST, new: str) -> str:
    """Return the text with the source of a node replaced; columns of the parser count bytes."""
    lines = text.encode().splitlines(keepends=True)
    start, end = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    return b"".join([*lines[: node.lineno - 1], start, new.encode(), end, *lines[node.end_lineno :]]).decode()


def first(text: str) -> str:
    """Return the first line, cut for the table."""
    return text.splitlines()[0][:100]


# ---- record


def record(out: Path, workers: int, paths: list[str]) -> int:
    """Run the tests once and note which lines each executes."""
    lines = out / "lines"
    shutil.rmtree(lines, ignore_errors=True)
    lines.mkdir(parents=True)
    environment = os.environ | {"EXECUTED_LINES": str(lines.resolve()), "EXECUTED_SOURCE": str(PROJECT / SOURCE)}
    environment["PYTHONPATH"] = os.pathsep.join([str(PROJECT / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "helpers.executed_lines", "-p", "no:cacheprovider", "-n", str(workers)]
    command += ["-m", "not slow and not gpu", "--tb=short", *paths]
    return subprocess.run(command, cwd=PROJECT, env=environment, check=False).returncode


def executed(out: Path) -> dict[tuple[str, int], list[tuple[float, str]]]:
    """Return the tests that execute each line, with their seconds, quickest first."""
    found: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for path in sorted((out / "lines").glob("lines_*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            for file, lines in row["lines"].items():
                for line in lines:
                    found.setdefault((file, line), []).append((row["seconds"], row["test"]))
    for tests in found.values():
        tests.sort()
    return found


# ---- plant


def drawn(lines: Iterable[tuple[str, int]], seed: int) -> Iterator[tuple[Bug, str]]:
    """Draw lines evenly and one bug of each; the same ones for the same seed and source."""
    generator = random.Random(seed)
    order = sorted(lines)
    generator.shuffle(order)
    for file, line in order:
        choices = bugs_of(file, line)
        if choices:
            yield generator.choice(choices)


def plant(out: Path, seed: int, count: int, rooms: list[str], workers: int) -> None:
    """Plant so many bugs, each in a copy of the project, and write what came of them."""
    lines = {place: tests for place, tests in executed(out).items() if not rooms or place[0].split("/")[0] in rooms}
    if not lines:
        sys.exit(f"no line of {', '.join(rooms) or 'the library'} was recorded in {out}; run `record` first")
    results = out / f"bugs_{seed}.jsonl"
    known = [json.loads(row) for row in results.read_text().splitlines()] if results.exists() else []
    done = {(row["file"], row["line"], row["operator"], row["before"]) for row in known}
    copies: Queue[Path] = Queue()
    for number in range(workers):
        copies.put(copy_of_project(out / f"copy_{number}"))
    bugs = []
    for bug, text in drawn(lines, seed):
        if len(bugs) == count:
            break
        bugs.append((bug, text))

    def one(bug: Bug, text: str) -> None:
        if (bug.file, bug.line, bug.operator, bug.before) in done:
            return
        folder = copies.get()
        try:
            start = time.monotonic()
            noticed_by = noticed(folder, bug, text, [test for _, test in lines[bug.file, bug.line]])
            row = asdict(bug) | {"noticed_by": noticed_by, "seconds": round(time.monotonic() - start, 1)}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{'noticed ' if noticed_by else 'UNSEEN  '} {bug.file}:{bug.line} {bug.before} -> {bug.after}", flush=True)
        finally:
            copies.put(folder)

    with ThreadPoolExecutor(workers) as pool:
        for each in [pool.submit(one, *bug) for bug in bugs]:
            each.result()


def copy_of_project(folder: Path) -> Path:
    """Return a copy of what the tests need, in which bugs are planted."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)
    return folder.resolve()


def noticed(folder: Path, bug: Bug, text: str, tests: list[str]) -> str:
    """Return the test that is red with the bug, "" if none is."""
    path = folder / SOURCE / bug.file
    original = path.read_text()
    path.write_text(text)
    try:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return failing(folder, tests[:QUICK]) or failing(folder, files)
    finally:
        path.write_text(original)


def failing(folder: Path, tests: list[str]) -> str:
    """Run tests until one is red; return its name."""
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-rf"]
    command += ["-m", "not slow and not gpu", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    if done.returncode in (0, 5):
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0][:200] if lines else f"pytest ended with {done.returncode}"


def table(out: Path) -> None:
    """Print the share that was noticed, by room, and every bug that was not."""
    rows = [json.loads(row) for path in sorted(out.glob("bugs_*.jsonl")) for row in path.read_text().splitlines()]
    rooms: dict[str, list[bool]] = {}
    for row in rows:
        rooms.setdefault(row["file"].split("/")[0], []).append(bool(row["noticed_by"]))
    for room, found in sorted(rooms.items()):
        print(f"{room:24} {sum(found):4} of {len(found):4}")
    seen = sum(bool(row["noticed_by"]) for row in rows)
    print(f"{'all':24} {seen:4} of {len(rows):4}: {seen / max(1, len(rows)):.1%}")
    for row in rows:
        if not row["noticed_by"]:
            print(f"unseen: {row['file']}:{row['line']} [{row['operator']}] {row['before']} -> {row['after']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "plant", "table"))
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"), help="folder of the results")
    parser.add_argument("--seed", type=int, default=0, help="draws other lines and operators")
    parser.add_argument("--count", type=int, default=200, help="bugs to plant")
    parser.add_argument("--rooms", default="", help="folders or files of the library, by comma; without: all")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("paths", nargs="*", help="record: tests to run; without: all")
    given = parser.parse_intermixed_args()
    if given.command == "record":
        return record(given.out, given.workers, given.paths)
    if given.command == "plant":
        plant(given.out, given.seed, given.count, [room for room in given.rooms.split(",") if room], given.workers)
    table(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
