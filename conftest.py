"""What the tests of the core share: seeds, poisoned memory, and feature maps with parameters away from their start."""

import multiprocessing
import os
import signal

# a shell starts what runs in its background with interrupts ignored; tests that interrupt themselves would wait for ever
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# before anything imports nalaformer's kernels: @triton.jit reads it when it decorates
os.environ.setdefault("TRITON_INTERPRET", "1")
# before torch is imported, here and in the processes that tests start: the threads of tests side by side wait for one another
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# workers and ranks are forked from a process that has imported these once, instead of importing them in each
multiprocessing.get_context("forkserver").set_forkserver_preload(["nalaformer.recipes"])

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

# before the test files that import from it and name it in pytest_plugins, which would be too late to rewrite it
pytest.register_assert_rewrite("helpers")

import nalaformer
from helpers.few_cases import few_cases
from helpers.many_seeds import Room, shift_seeds
from helpers.maps import KINDS, MAP_NAMES, VARIANCE_AWARE, VARIANTS
from helpers.quick_interpreter import quicken
from nalaformer import FeatureMap
from nalaformer.ops.backend import INTERPRETING, TRITON_FOUND

if INTERPRETING and TRITON_FOUND:
    quicken()

MapMaker = Callable[..., FeatureMap]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="draw other random numbers in every test")
    parser.addoption("--room", type=Path, help="append error / bar of every comparison to this file; see tests/run_seeds.py")


def pytest_configure(config: pytest.Config) -> None:
    seed, room = config.getoption("--seed"), config.getoption("--room")
    if seed:
        config.add_cleanup(shift_seeds(seed))
    if room:
        config.pluginmanager.register(Room(room, seed))


# last: a case that another option leaves out covers nothing
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = few_cases(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test draws the same numbers, and leaves the backend as it was, whichever tests run before it."""
    torch.manual_seed(0)
    before = nalaformer.get_backend()
    yield
    nalaformer.set_backend(before)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so a value that was never written is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The tensors of these tests are small: a second thread only waits, and on a busy machine it waits long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=MAP_NAMES)
def map_name(request: pytest.FixtureRequest) -> str:
    """Every map of the registry, and its main options."""
    return request.param


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A map of each kind, for what does not depend on the formula of the map."""
    return request.param


@pytest.fixture(params=[False, True], ids=["bidirectional", "causal"])
def causal(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=["reference", "chunked"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on this backend."""
    with nalaformer.use_backend(request.param):
        yield request.param


@pytest.fixture
def make_map() -> MapMaker:
    """A map by its name in MAP_NAMES, with parameters moved away from their start: zeros there would hide mistakes."""

    def make(name: str, *, num_heads: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> FeatureMap:
        variants = VARIANTS | {VARIANCE_AWARE: ("reflection", {"variance": True})}
        kind, options = variants.get(name, (name, {}))
        feature_map = nalaformer.feature_map(kind, num_heads=num_heads, head_dim=head_dim, **options)
        with torch.no_grad():
            for parameter in feature_map.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return feature_map.to(dtype)

    return make


@pytest.fixture
def make_qkv() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Random q [B, N, H, D], k [B, M, K, D] and v [B, M, K, V]; M = N, K = H and V = D unless told."""

    def make(
        batch: int = 2,
        tokens: int = 7,
        heads: int = 2,
        head_dim: int = 8,
        *,
        keys: int | None = None,
        key_heads: int | None = None,
        values: int | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, key_heads, values = keys or tokens, key_heads or heads, values or head_dim
        return (
            torch.randn(batch, tokens, heads, head_dim, dtype=dtype),
            torch.randn(batch, keys, key_heads, head_dim, dtype=dtype),
            torch.randn(batch, keys, key_heads, values, dtype=dtype),
        )

    return make
