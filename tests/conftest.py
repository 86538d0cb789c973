"""What holds for every test: one thread, no leftovers, in any order; GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from tests.support.census import AS_NEW, Census, renew, switches
from tests.support.installed import read_once
from tests.support.leftovers import end_leftovers
from tests.support.ranks import PRELOADED

# Read by torch when it is first imported, here or in a child process, so that tests without torch stay quick.
os.environ["OMP_NUM_THREADS"] = "1"
# Settings of the developer's own would change what the tests see.
for _name in [name for name in os.environ if name.startswith("MEGATRON_RUN_")]:
    del os.environ[_name]

# With it every worker and every process of a test would compile all sources again: half of what collecting takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ranks share the cores. Where a message that arrives interrupts its sender, who holds gloo's lock just then, another of
# gloo's threads spins. Inherited by every process, this makes steps of four ranks on two cores up to a fifth cheaper.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A shell ignores it in what it starts with `&`; tests press Ctrl-C, and so do the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported and collected stays to the end, and looking for garbage in it takes a worker seconds.
gc.disable()

#: Files that cannot be read without a library that an offline bundle leaves out (tests/bundle).
collect_ignore = [
    file
    for file, library in {
        "docs/test_docs_site.py": "mkdocs",
        "plugins/format/huggingface/test_format_huggingface.py": "transformers",
    }.items()
    if find_spec(library) is None
]

#: Every process that a test starts inherits this variable, and can be found by it even when its parent is gone.
MARK = "TESTED_BY"


@pytest.fixture(scope="session", autouse=True)
def _marked_environment() -> Iterator[str]:
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield mark
    del os.environ[MARK]


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left_behind(_marked_environment: str) -> Iterator[None]:
    """After the tests of a file, every process they started has ended; the message names the test that started it."""
    yield
    left = end_leftovers(f"{MARK}={_marked_environment}", patience=3.0)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def _installed_is_read_once() -> Iterator[None]:
    with read_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def _all_ranks_are_forked_from_one_server() -> Iterator[None]:
    """It has loaded what those of all tests need, also where a suite starts it: each would load seconds anew."""
    with mock.patch("megatron_run_testing.ranks._PRELOADED", PRELOADED):
        yield


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_in_the_process(request: pytest.FixtureRequest, _installed_is_read_once: None) -> Iterator[None]:
    """After the tests of a file this process holds nothing more than before: whoever opens closes.

    Garbage is collected first, so that what only waits for that is reported here, as Python's warning of what was never
    closed, and not in a test of another file. The rest is frozen: each object is looked at after one file.
    """
    if any(item.get_closest_marker("gpu") for item in request.session.items if item.path == request.path):
        _start_gpu()
    before = Census.take()
    yield
    gc.collect()
    gc.freeze()
    left = Census.left_since(before)
    assert not left, f"{request.path.name} leaves behind: {left}"


def _start_gpu() -> None:
    """Start CUDA where there is a GPU: it opens pipes and events once in a process, and keeps them."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def _torch_is_as_new(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test torch's switches are as in a new process. One that leaves another fails, and the next is spared."""
    yield
    request.node.funcargs.clear()  # else the last test of a file holds what its fixtures made until the file's end
    if torch := sys.modules.get("torch"):
        found = switches()
        if found != AS_NEW:
            renew(torch)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        # torch.manual_seed would also keep a stack trace for CUDA, used or not: half a millisecond.
        torch.default_generator.manual_seed(0)
        assert found == AS_NEW


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Of a whole run each worker imports a share of the files first.

    In a new checkout importing is mostly compiling, which all workers would do of each file at the same time. So each
    compiles its share and finds those of the others.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source != session.config.ArgsSource.TESTPATHS:
        return
    files = sorted((session.config.rootpath / "tests").rglob("test_*.py"))
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # collecting says it
            _ = pytest.Module.from_parent(session, path=file).obj


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that may take longest, so that no worker is left with one when the others are done."""
    longest: dict[Path, tuple[float, bool]] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, (0.0, False)), _may_take(item))
    items.sort(key=lambda item: longest[item.path], reverse=True)  # files of equal rank, and tests, keep their order


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """From here on there is garbage, of which the tests of one file make little."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 100)
    gc.enable()


def _may_take(item: pytest.Item) -> tuple[float, bool]:
    """The time limit of ``item`` where it has one of its own, and whether it is marked as slow."""
    limit = item.get_closest_marker("timeout")
    return float(limit.args[0]) if limit else 0.0, item.get_closest_marker("slow") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a GPU test where there is no GPU, and look for one only when such a test is about to run."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
