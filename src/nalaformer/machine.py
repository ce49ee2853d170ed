"""Facts about the machine: versions, devices, commit of the source, and installed extras."""

import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
UNKNOWN = "unknown"
# these extras only combine others
COLLECTIONS = ("all", "dev")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The versions, commit and devices that a measurement ran with."""

    python: str
    torch: str
    triton: str
    nalaformer: str
    commit: str
    """The commit of the package's source, with "+dirty" if code changed since; "unknown" outside a git checkout."""
    cpu: str
    threads: int
    gpus: tuple[str, ...]

    def device_name(self, device: str) -> str:
        return self.gpus[torch.cuda.current_device()] if device == "cuda" else self.cpu

    def columns(self, device: str) -> dict[str, str]:
        """Return the columns about the machine, which every row of results has."""
        versions = {"torch": self.torch, "triton": self.triton, "nalaformer": self.nalaformer, "commit": self.commit}
        return {"device": self.device_name(device), **versions}


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An optional dependency group of the package."""

    name: str
    present: tuple[str, ...]
    """Installed packages with their versions."""
    missing: tuple[str, ...]

    @property
    def install(self) -> str:
        return f"pip install 'nalaformer[{self.name}]'"


def describe_machine() -> Machine:
    gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Machine(
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version_of("triton") or "none",
        nalaformer=version_of("nalaformer") or UNKNOWN,
        commit=source_commit(PACKAGE),
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        gpus=gpus,
    )


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or UNKNOWN


def source_commit(folder: Path) -> str:
    """Return the commit of a folder of source; "unknown" if git does not track it.

    It is marked "+dirty" if a file in the folder differs, or other Python code of the same checkout.
    """
    # an installed package may lie inside an unrelated checkout: only a tracked one has a commit
    if not git(folder, "ls-files", "--", "."):
        return UNKNOWN
    commit = git(folder, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return UNKNOWN
    # the scripts that measure may lie beside the package
    return f"{commit}+dirty" if git(folder, "status", "--porcelain", "--", ".", ":(top)*.py") else commit


def git(folder: Path, *arguments: str) -> str:
    """Return the output of git, or "" if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def extras() -> list[Extra]:
    """Return the extras that the installed package declares."""
    try:
        requirements = metadata.requires("nalaformer") or []
    except metadata.PackageNotFoundError:
        return []
    packages: dict[str, list[str]] = {}
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w-]+)", requirement)
        if name is not None and extra is not None and extra[1] not in COLLECTIONS:
            packages.setdefault(extra[1], []).append(name[0])
    result = []
    for extra_name, names in packages.items():
        versions = {name: version_of(name) for name in names}
        present = tuple(f"{name} {version}" for name, version in versions.items() if version)
        missing = tuple(name for name, version in versions.items() if not version)
        result.append(Extra(name=extra_name, present=present, missing=missing))
    return result
