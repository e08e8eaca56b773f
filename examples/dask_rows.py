"""A head on more rows than fit in memory: Dask's workers draw chunks of them, run the head on each, and drop it.

There is one worker for each GPU; without a GPU, two processes use NumPy. Each gets the weights once. A worker for a GPU
has two threads: one prepares a chunk while the other waits for the results of one.

    python examples/dask_rows.py [--rows N] [--features N] [--outputs N] [--chunk ROWS] [--workers N]

105 GB of float32 on all GPUs of a machine:

    python examples/dask_rows.py --rows 3200000 --features 8192 --outputs 8192 --chunk 16384
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import time
from concurrent.futures import Future as ConcurrentFuture
from typing import Any

import dask.array as da
import numpy as np
from common import array_module, draw_rows, largest_of_rows
from cupyfuse.heads import example_inputs, head_softmax
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, progress, wait


def cluster_of(workers: int, xp: Any) -> Any:
    """Start worker processes: one for each GPU, or `workers` of them that use the CPU."""
    if xp is np:
        return LocalCluster(n_workers=workers or 2, threads_per_worker=1, dashboard_address=None)
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(xp.cuda.runtime.getDeviceCount())))
        gpus = visible.split(",")[: workers or None]
        options = [{"nthreads": 2, "env": {"CUDA_VISIBLE_DEVICES": gpu}} for gpu in gpus]
        return SpecCluster(
            scheduler={"cls": Scheduler, "options": {"dashboard_address": None}},
            workers={k: {"cls": Nanny, "options": own} for k, own in enumerate(options)},
            silence_logs=logging.WARNING,
        )
    return LocalCUDACluster(n_workers=workers or None, threads_per_worker=2, dashboard_address=None)


def head_of_drawn_rows(rows: tuple[int, ...], weights: dict[str, Any], seed: int) -> tuple[Any, Any, Any]:
    """Return rows in chunks of these lengths, their probabilities, and the mean of each row's largest one, all lazy."""
    weight = weights["weight"]
    xp = np if isinstance(weight._meta, np.ndarray) else array_module()
    chunks = (rows, (weight.shape[1],))
    x = da.map_blocks(draw_rows, xp is not np, seed, chunks=chunks, meta=xp.empty((0, 0), np.float32))
    probabilities = head_softmax(x, **weights)
    # A column, and no vector: `map_blocks` that drops an axis, or `max(axis=1)`, would be tasks beside the head's.
    largest = probabilities.map_blocks(largest_of_rows, chunks=(rows, (1,)), meta=np.empty((0, 0), np.float32))
    return x, probabilities, largest.mean(axis=0, split_every=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 40000, "features": 256, "outputs": 256, "chunk": 4096, "workers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    xp = array_module()
    inputs = {k: xp.asarray(v) for k, v in example_inputs(head_softmax, 1, given.features, given.outputs).items()}
    del inputs["x"]

    rows = tuple(min(given.chunk, given.rows - first) for first in range(0, given.rows, given.chunk))
    with cluster_of(given.workers, xp) as cluster, Client(cluster) as client:
        # The large weight stays on the workers: else it would be in the graph. Dask's memory manager would drop copies
        # of it between two computations.
        client.amm.stop()
        kept = {**inputs, "weight": client.persist(da.from_array(inputs["weight"], chunks=-1, asarray=False))}
        x, probabilities, mean = head_of_drawn_rows(rows, kept, 0)
        print(f"{x.npartitions} chunks, {x.nbytes / 1e9:.3g} GB of x, {probabilities.nbytes / 1e9:.3g} GB of results")
        # First other rows on each worker, in chunks of all lengths and enough for both threads: that starts CUDA,
        # fetches the weights, compiles the kernels and fills the memory pool.
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        others = [head_of_drawn_rows((*rows[:2], rows[-1]), kept, 1 + k)[2] for k in range(len(workers))]
        wait([client.compute(other, workers=[w]) for other, w in zip(others, workers, strict=True)])
        # What is loaded by now stays: Python's garbage collector need not walk it (0.1 s) while chunks wait.
        gc.freeze()
        client.run(gc.freeze)

        end: ConcurrentFuture[float] = ConcurrentFuture()
        start = time.perf_counter()
        # No chunk of x or of the probabilities outlives its task.
        future = client.compute(mean)
        future.add_done_callback(lambda _: end.set_result(time.perf_counter()))  # the display ends up to 0.1 s later
        progress(future, notebook=False)
        (found,) = future.result()
        seconds = end.result() - start
        few, few_rows = client.gather(client.compute([probabilities[:8], x[:8]]))
    expected = head_softmax.__wrapped__(few_rows, **inputs)
    if not float(abs(few - expected).max()) <= 1e-5:
        raise SystemExit("the chunks' results differ from those of the plain function")
    print(f"\nmean of the largest probabilities: {found:.6f}")
    print(f"{seconds:.3g} s on {len(workers)} workers, drawing included: {x.nbytes / seconds / 1e9:.3g} GB/s of x")


if __name__ == "__main__":
    main()
