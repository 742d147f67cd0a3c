from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

# Why before torch is imported, and for processes that tests start: with a worker of xdist on each
# core, threads of small operations mostly wait for each other. It took half of the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Why: Inductor compiles six programs in each process that uses it, to find out which vector
# instructions the compiler knows. That takes longer than to compile what the tests compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

_SLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    # Why not at the top: the process that starts the workers of xdist runs no test, and they start
    # when it is ready.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import tests.ranks  # noqa: F401  # torch, before warnings are errors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run every case of long tables, and the longest tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that are slow as a whole, before they import what only they need."""
    is_test_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr == "not slow" and is_test_file and _SLOW_FILE.search(collection_path.read_text()):
        return True
    return None


def _uses_processes(item: pytest.Item) -> bool:
    """Return whether a test itself calls ``run_ranks``, whose pool of processes takes seconds to start."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {getattr(value, "__name__", "") for value in values}
    return "run_ranks" in (*names, *(code.co_names if code else ()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs at night, unless you name a test by its id."""
    left_out, cases = [], Counter[str]()
    for item in items:
        if _uses_processes(item):
            item.add_marker(pytest.mark.slow)
        if mark := item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.slow)
            table, one_in = item.nodeid.partition("[")[0], mark.kwargs.get("one_in")
            if one_in is None or cases[table] % one_in:
                left_out.append(item)
            cases[table] += 1
    if not config.getoption("--nightly") and not any("::" in arg for arg in config.args):
        config.hook.pytest_deselected(items=left_out)
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]


gc.disable()  # until the collection has ended: modules and tests are all kept, and are many


def pytest_collection_finish(session: pytest.Session) -> None:
    from tests.ranks import COLLECTED_AFTER, SLOW_TESTS

    # Why after the collection: only now it is known which tests are deselected.
    if any(item.get_closest_marker("slow") for item in session.items):
        os.environ[SLOW_TESTS] = "1"
    gc.enable()
    gc.freeze()  # else each full collection in a test walks over torch and over ten thousand tests
    gc.set_threshold(*COLLECTED_AFTER)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let every test draw the same numbers, whatever ran before it in this process."""
    import torch

    # Why not torch.manual_seed: for devices that there are not it walks over the stack each time.
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip what simulated ranks compile where torch cannot."""
    try:
        return (yield)
    except RuntimeError as error:
        if "torch before 2.13 crashes the process" in str(error):
            pytest.skip("torch crashes when a second thread compiles")
        raise


@pytest.fixture(scope="session", autouse=True)
def _workers_end_with_the_session() -> Iterator[None]:
    yield
    from tests.ranks import close_pool

    close_pool()


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    """Let memory be freed by reference counts alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def server_of_forks() -> None:
    """Start the process that others are forked from, before code that would start it with fewer imports."""
    from tests.ranks import forking

    # Why: each process has one such server. Without transformers in it, every rank of every later
    # test imports transformers by itself.
    forking()
    forkserver.ensure_running()
