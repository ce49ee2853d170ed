"""Run the test suites of timm and transformers over our models, and write a table of what passed, failed and was skipped.

    python tests/run_peers.py --timm FOLDER --transformers FOLDER --authors FOLDER
        [--out runs/peers] [-k EXPRESSION] [--all-names]

A FOLDER is a checkout of the peer's repository at the version that is installed here; without it that suite does not run. The
source distribution of timm holds the tests of its version, that of transformers the files tests/test_*.py: copied over a
checkout that is a little older, they bring the common tests up to date. RUN_SLOW=1 runs transformers' slow tests too.
transformers' suites need the packages parameterized and httpx. Exits with 1 if a test failed.

The folder of --authors holds checkouts of the repositories of the papers, each named OWNER+REPOSITORY as in
helpers/peers_authors.py. Their whole networks are compared with ours; those that are not there are named. It needs einops.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
# these need several GPUs or files from the network, whatever the model
ELSEWHERE = "not fsdp and not tp_ and not tensor_parallel and not pipeline"
# the suite of a model of the peer's own, with layers of the same kinds, that runs beside ours
BESIDE = "Qwen3NextModelTest"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", type=Path, help="a checkout of timm's repository")
    parser.add_argument("--transformers", type=Path, help="a checkout of transformers' repository")
    parser.add_argument("--authors", type=Path, help="a folder with checkouts of the authors' repositories")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="folder of the results; emptied first")
    parser.add_argument(
        "-k", dest="chosen", default="", help="tests whose names fit, as in pytest; of the authors' networks a part of the name"
    )
    parser.add_argument("--all-names", action="store_true", help="every backbone, not one of each family")
    given = parser.parse_args()
    if given.timm is None and given.transformers is None and given.authors is None:
        parser.error("give at least one of --timm, --transformers and --authors")
    out = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    suites = []
    if given.timm is not None:
        folder = prepare(given.timm, out / "timm", ["tests"])
        options = ["-p", "helpers.peers_timm", str(folder / "tests" / "test_models.py"), "-k", given.chosen]
        suites.append(("timm", run(folder, options, {"PEERS_ALL_NAMES": "1" if given.all_names else ""})))
    if given.transformers is not None:
        lacking = [name for name in ("parameterized", "httpx") if find_spec(name) is None]
        if lacking:
            parser.error(
                f"transformers' suites import {' and '.join(lacking)}, not found here; pip install {' '.join(lacking)}"
            )
        folder = prepare(given.transformers, out / "transformers", ["tests", "utils"])
        # the suites read the sources of the installed package where a checkout has them
        (folder / "src").mkdir()
        (folder / "src" / "transformers").symlink_to(Path(find_spec("transformers").origin).parent)
        chosen = f"({ELSEWHERE}) and ({given.chosen})" if given.chosen else ELSEWHERE
        options = ["--import-mode=importlib", str(TESTS / "helpers" / "peers_transformers.py"), "-k", chosen]
        suites.append(("transformers", run(folder, options, {"HF_HUB_OFFLINE": "1"})))
    texts, agree = [table(name, file) for name, file in suites], True
    if given.authors is not None:
        if find_spec("einops") is None:
            parser.error("the authors' code imports einops, not found here; pip install einops")
        from helpers.peers_authors import compare

        compared, agree = compare(given.authors, given.chosen)
        texts.append(compared)
    text = "\n\n".join(texts)
    out.mkdir(parents=True, exist_ok=True)
    (out / "peers.md").write_text(text + "\n")
    print(text, f"\n\nwritten to {out / 'peers.md'}")
    return int(not agree or any(outcomes(file)[1] for _, file in suites))


def prepare(checkout: Path, folder: Path, parts: list[str]) -> Path:
    """A folder with the parts of the checkout that the suites read, apart from its sources: the installed package is tested."""
    folder.mkdir(parents=True)
    for part in parts:
        if not (checkout / part).is_dir():
            sys.exit(f"a checkout must hold the folder {part}, got {checkout} without it")
        (folder / part).symlink_to((checkout / part).resolve())
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def run(folder: Path, options: list[str], environment: dict[str, str]) -> Path:
    """The results as a file in JUnit's form."""
    results = folder / "results.xml"
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), str(folder), os.environ.get("PYTHONPATH", "")])
    settings = ["-c", str(folder / "pytest.ini"), "-q", "-W", "ignore", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *settings, f"--junitxml={results}", *options]
    subprocess.run(command, cwd=folder, env=os.environ | environment | {"PYTHONPATH": path}, check=False)
    if not results.exists():
        sys.exit(f"the tests in {folder} could not be collected; the messages above say why")
    return results


def results_of(file: Path) -> dict[tuple[str, str], str]:
    """By class and test: "passed", "failed", or why it was skipped. One of several parts that did not pass speaks for all."""
    found: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        test = case.get("classname", "").rpartition(".")[2], case.get("name", "")
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found[test] = "failed"
        elif found.get(test, "passed") == "passed":
            found[test] = "passed" if reason is None else (reason.get("message", "").splitlines() or [""])[0]
    return found


def outcomes(file: Path) -> tuple[int, list[str], Counter[str]]:
    """Of ours: how many passed, which failed, and how many were skipped for each reason."""
    ours = {test: result for test, result in results_of(file).items() if test[0] != BESIDE}
    failed = sorted(f"{suite}::{name}" for (suite, name), result in ours.items() if result == "failed")
    skipped = Counter(result for result in ours.values() if result not in ("passed", "failed"))
    return list(ours.values()).count("passed"), failed, skipped


def skipped_by_ours_alone(file: Path) -> list[tuple[str, int, str]]:
    """(test, layouts of ours that skip it, why) for what the peer's own model passes, parameters left out."""
    results = results_of(file)
    passed = {name for (suite, name), result in results.items() if suite == BESIDE and result == "passed"}
    alone: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (suite, name), result in results.items():
        if suite != BESIDE and name in passed and result not in ("passed", "failed"):
            alone[re.sub(r"_\d+_.*", "", name), result].add(suite)
    return sorted((name, len(suites), reason) for (name, reason), suites in alone.items())


def table(name: str, file: Path) -> str:
    passed, failed, skipped = outcomes(file)
    versions = ", ".join(f"{package} {version(package)}" for package in (name, "torch"))
    lines = [f"## {name}: {passed} passed, {len(failed)} failed, {skipped.total()} skipped ({versions})", ""]
    lines += [f"- failed: {test}" for test in failed]
    lines += ["", "| skipped | why |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in skipped.most_common()]
    if any(suite == BESIDE for suite, _ in results_of(file)):
        lines += ["", f"Skipped by ours, passed by {BESIDE}:", "", "| test | layouts | why |", "|---|---|---|"]
        lines += [f"| {test} | {count} | {reason} |" for test, count, reason in skipped_by_ours_alone(file)]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
