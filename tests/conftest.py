"""Fixtures that every test may use."""

from __future__ import annotations

import datetime
import gc
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from host_cuda.library import SHARED_BUILD, locked
from hypothesis import HealthCheck, settings
from support import CUDA, HOST, NUMPY, Engine, of_day

from cupyfuse.settings import force_plans

settings.register_profile(
    "cupyfuse",
    max_examples=int(os.environ.get("CUPYFUSE_EXAMPLES", "2000")),
    deadline=None,
    derandomize="CUPYFUSE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cupyfuse")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With workers (`-n`): neighbouring tests stay together, so that what a file prepares is prepared once."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if getattr(config.option, "numprocesses", None):
        # Workers keep all processors busy: threads of theirs would only wait for each other.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that a test starts tells where it crashed
    if SHARED_BUILD not in os.environ:
        folder = os.environ[SHARED_BUILD] = tempfile.mkdtemp(prefix="host_cuda_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def rotates(item: pytest.Item) -> bool:
    """Whether the case has days of its own: by `rotates`, or as one of kernels on the CPU by `kernels_rotate`."""
    if item.get_closest_marker("kernels_rotate") is None:
        return item.get_closest_marker("rotates") is not None
    assert isinstance(item, pytest.Function)
    values = item.callspec.params.values()
    return any(value is HOST or (isinstance(value, str) and value == HOST.name) for value in values)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the cases of tests that rotate to their day, unless `CUPYFUSE_ALL_TESTS` is set."""
    if "CUPYFUSE_ALL_TESTS" in os.environ:
        return
    on_cpu = [i.nodeid for i in items if rotates(i) and not i.get_closest_marker("gpu")]
    on_gpu = [i.nodeid for i in items if rotates(i) and i.get_closest_marker("gpu")]
    day = datetime.date.today().toordinal()
    left = {*on_cpu, *on_gpu} - of_day(day, on_cpu) - of_day(day, on_gpu)
    if left:
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in left])
        items[:] = [i for i in items if i.nodeid not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def settled_garbage() -> None:
    """Keep the garbage collector from walking what imports and earlier files have left again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same in every run, and others in every test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(scope="session")
def shared_result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """Return what a function computes, as JSON can hold it: computed once, whichever worker asks first."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def result(name: str, compute: Callable[[], Any]) -> Any:
        path = folder / f"{name}.json"
        with locked(folder / f"{name}.lock"):
            if not path.exists():
                path.write_text(json.dumps(compute()))
            return json.loads(path.read_text())

    return result


@pytest.fixture(autouse=True)
def plans_run() -> Iterator[None]:
    """Plans run on the NumPy engine also where the function as written is faster, which would test nothing."""
    with force_plans():
        yield


ENGINES = (
    pytest.param(NUMPY, id="numpy"),
    pytest.param(HOST, id="host"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of the case: NumPy's, the kernels on the CPU, and on a GPU where there is one."""
    engine: Engine = request.param
    engine.require()
    with engine.active():
        yield engine


@pytest.fixture
def every_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse every chain that can be fused, however small: the cost model chooses nothing."""
    from cupyfuse.torch.cost import decision
    from cupyfuse.torch.graphs import partition

    monkeypatch.setattr(decision, "judge_for", lambda *args, **kwargs: partition.judge_without_costs)
