"""Threads, processes and a cluster: equal results, kernels planned once, and workers that die."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cupyfuse.heads import HEADS, example_inputs
from distributed import Client, LocalCluster

import cupyfuse as cf
from cupyfuse.dask import tasks


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two processes that are started again where they die; they import this checkout."""
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "10s"}),
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def arguments() -> dict[str, Any]:
    return {k: np.asarray(v, np.float64) for k, v in example_inputs(HEADS["head_softmax"], 40, 8, 12).items()}


def chunked(inputs: dict[str, Any]) -> dict[str, Any]:
    x, weight = inputs["x"], inputs["weight"]
    return {**inputs, "x": da.from_array(x, chunks=(7, 5)), "weight": da.from_array(weight, chunks=(5, 8))}


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_schedulers_of_this_process(scheduler: str) -> None:
    inputs = arguments()
    lazy = HEADS["head_softmax"](**chunked(inputs))
    np.testing.assert_allclose(lazy.compute(scheduler=scheduler), HEADS["head_softmax"](**inputs), rtol=1e-12)


def test_threads_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    load = tasks.load_graph

    def counted(*given: Any) -> Any:
        made.append(threading.get_ident())
        time.sleep(0.02)  # others arrive meanwhile
        return load(*given)

    monkeypatch.setattr(tasks, "load_graph", counted)
    offset = float(np.random.default_rng().random())  # no plan of another test
    x = da.ones((64, 5), chunks=(2, 5))
    lazy = cf.fuse(lambda x: cf.softmax(x * offset, axis=1))(x)
    np.testing.assert_allclose(lazy.compute(scheduler="threads", num_workers=8), 0.2)
    assert len(made) == 1


def test_processes() -> None:
    """A function made here, with an array around it, in processes that cannot import it."""
    inputs, shift = arguments(), np.arange(12.0)
    head = cf.fuse(lambda x, weight: cf.softmax(x @ weight.T + shift, axis=1))
    given = chunked(inputs)
    lazy = head(given["x"], given["weight"])
    found = lazy.compute(scheduler="processes", num_workers=2)
    np.testing.assert_allclose(found, head(inputs["x"], inputs["weight"]), rtol=1e-12)


def test_a_cluster(client: Client) -> None:
    inputs = arguments()
    lazy = [head(**{k: v for k, v in chunked(inputs).items() if k in head.names}) for head in HEADS.values()]
    for head, found in zip(HEADS.values(), client.compute(lazy, sync=True), strict=True):
        expected = head(**{k: v for k, v in inputs.items() if k in head.names})
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_workers_plan_once(client: Client) -> None:
    offset = float(np.random.default_rng().random())
    before = client.run(_plans)
    x = da.ones((60, 5), chunks=(1, 5))
    client.compute(cf.fuse(lambda x: x + offset)(x), sync=True)
    after = client.run(_plans)
    assert all(after[worker] - before[worker] <= 1 for worker in after)


def _plans() -> int:
    from cupyfuse.dask.tasks import _executables

    return len(_executables._values)


def test_a_worker_dies(client: Client, tmp_path: Path) -> None:
    """The tasks of a worker that dies run again elsewhere: they read nothing but their arguments."""
    died = tmp_path / "died"

    def slow(block: Any) -> Any:
        time.sleep(0.03)
        if block[0, 0] == 9 and not died.exists():
            died.touch()
            os._exit(1)
        return block

    rows = np.repeat(np.arange(16.0)[:, None], 6, axis=1) + np.linspace(0, 1, 6)
    x = da.from_array(rows, chunks=(1, 3)).map_blocks(slow, meta=np.empty((0, 0)))
    w = np.linspace(-1, 1, 24).reshape(4, 6)
    head = cf.fuse(lambda x, w: (cf.softmax(x @ w.T, axis=1), cf.logsumexp(x, axis=1)))
    found = client.compute(head(x, w), sync=True)
    assert died.exists()
    for got, want in zip(found, head(rows, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)
