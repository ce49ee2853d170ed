"""Print the test files that a change concerns: those that changed, those that import what changed or a neighbor that uses it.

    python tests/changed_tests.py [--since main]

The whole suite stays the judge (`make test`); this is what to run after every edit (`make check`).
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
SOURCE = PROJECT / "src"
# these concern everything and run with the whole suite
LEFT_OUT = ("tests/project/",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="main", help="commit or branch with which the tree is compared")
    print("\n".join(sorted(tests_for(changed_files(parser.parse_args().since)))))
    return 0


def changed_files(since: str) -> set[str]:
    """Return the files that differ from the point where this branch left `since`, and those that git does not know yet."""
    base = git("merge-base", since, "HEAD") or git("rev-parse", "HEAD")
    return set(git("diff", "--name-only", base[0]) + git("ls-files", "--others", "--exclude-standard"))


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def tests_for(changed: set[str]) -> set[str]:
    """Return the test files that a change of these files concerns."""
    sources = {module_name(path): path for path in SOURCE.rglob("*.py")}
    helpers = {f"helpers.{path.stem}": path for path in (TESTS / "helpers").glob("*.py")}
    modules = sources | helpers
    homes = names_of_packages(sources)
    imports = {name: imported(path, name, modules, homes) for name, path in modules.items()}
    concerned = {name for name, path in modules.items() if str(path.relative_to(PROJECT)) in changed}
    # neighbors in the same package that use it; helpers pass on whatever they import
    near = concerned | {
        name for name, used in imports.items() if any(package(each) == package(name) for each in used & concerned)
    }
    near |= {name for name in helpers if imports[name] & near}
    files, reached = set(), set()
    for path in TESTS.rglob("test_*.py"):
        name = str(path.relative_to(PROJECT))
        used = imported(path, "", modules, homes) & near
        reached |= used
        if name in changed or (used and not name.startswith(LEFT_OUT)):
            files.add(name)
    # what is found through a registry is imported by no test: the tests of its room
    for name in concerned - reached - set(helpers):
        files |= {str(path.relative_to(PROJECT)) for path in room_of(name).rglob("test_*.py")}
    return files


def package(module: str) -> str:
    return module.rpartition(".")[0]


def room_of(module: str) -> Path:
    """Return the folder of tests that is named as the packages of a module are, as deep as there is one."""
    folder = TESTS
    for part in module.split(".")[1:]:
        if not (folder / part).is_dir():
            break
        folder = folder / part
    return folder if folder != TESTS else TESTS / "project"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_of_packages(sources: dict[str, Path]) -> dict[str, dict[str, str]]:
    """Return for each package the module that each name of its `__init__` comes from."""
    homes: dict[str, dict[str, str]] = {}
    for package, path in sources.items():
        if path.name == "__init__.py":
            homes[package] = {
                name.asname or name.name: absolute(node, package, is_package=True)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom)
                for name in node.names
            }
    return homes


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the absolute name of the module that a statement imports from."""
    if not node.level:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported(path: Path, module: str, modules: dict[str, Path], homes: dict[str, dict[str, str]]) -> set[str]:
    """Return the modules of ours that a file imports; a name of a package counts as the module that defines it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, module, is_package=path.name == "__init__.py")
            for name in node.names:
                found.add(home_of(source, name.name, modules, homes))
    return {name for name in found if name in modules and name != "nalaformer"}


def home_of(source: str, name: str, modules: dict[str, Path], homes: dict[str, dict[str, str]]) -> str:
    """Return the module that a name comes from, through packages that pass it on."""
    while True:
        if f"{source}.{name}" in modules:
            return f"{source}.{name}"
        home = homes.get(source, {}).get(name)
        if home is None or home == source:
            return source
        source = home


if __name__ == "__main__":
    sys.exit(main())
