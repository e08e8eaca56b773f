"""A head on more rows than fit in memory: Dask's workers draw chunks of them, run the head on each, and drop it.

There is one worker for each GPU; without a GPU, two processes use NumPy. Each gets the weights once.

    python examples/dask_rows.py [--rows N] [--features N] [--outputs N] [--chunk ROWS] [--workers N]

105 GB of float32 on all GPUs of a machine:

    python examples/dask_rows.py --rows 3200000 --features 8192 --outputs 8192 --chunk 16384
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

import dask.array as da
import numpy as np
from common import array_module
from cupyfuse.heads import example_inputs, head_softmax
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, progress


def cluster_of(workers: int, xp: Any) -> Any:
    """Start worker processes: one for each GPU, or `workers` of them that use the CPU."""
    if xp is np:
        return LocalCluster(n_workers=workers or 2, threads_per_worker=1, dashboard_address=None)
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(xp.cuda.runtime.getDeviceCount())))
        gpus = visible.split(",")[: workers or None]
        options = [{"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": gpu}} for gpu in gpus]
        return SpecCluster(
            scheduler={"cls": Scheduler, "options": {"dashboard_address": None}},
            workers={k: {"cls": Nanny, "options": own} for k, own in enumerate(options)},
            silence_logs=logging.WARNING,
        )
    return LocalCUDACluster(n_workers=workers or None, dashboard_address=None)


def draw(on_gpu: bool, block_info: Any = None) -> Any:
    """Draw a chunk of rows on the worker, the same ones whenever it is drawn again."""
    here = block_info[None]
    if on_gpu:
        import cupy

        random = cupy.random.default_rng(here["chunk-location"][0])
    else:
        random = np.random.default_rng(here["chunk-location"][0])
    return random.standard_normal(here["chunk-shape"], dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rows": 40000, "features": 256, "outputs": 256, "chunk": 4096, "workers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    xp = array_module()
    inputs = {k: xp.asarray(v) for k, v in example_inputs(head_softmax, 1, given.features, given.outputs).items()}
    del inputs["x"]

    rows = [min(given.chunk, given.rows - first) for first in range(0, given.rows, given.chunk)]
    chunks = (tuple(rows), (given.features,))
    x = da.map_blocks(draw, xp is not np, chunks=chunks, meta=xp.empty((0, 0), np.float32))
    with cluster_of(given.workers, xp) as cluster, Client(cluster) as client:
        # The weights stay on the workers. Nothing else is computed before the end, where no chunk of x or of the
        # probabilities outlives its task.
        kept = {k: client.persist(da.from_array(v, chunks=-1, asarray=False)) for k, v in inputs.items()}
        probabilities = head_softmax(x, **kept)
        print(f"{x.npartitions} chunks, {x.nbytes / 1e9:.3g} GB of x, {probabilities.nbytes / 1e9:.3g} GB of results")
        # First a chunk on each worker, which starts CUDA, fetches the weights and compiles the kernels there.
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        blocks = [probabilities.blocks[k % probabilities.npartitions][:8] for k in range(len(workers))]
        few = client.gather([client.compute(b, workers=[w]) for b, w in zip(blocks, workers, strict=True)])
        start = time.perf_counter()
        largest = client.compute(probabilities.max(axis=1).mean())
        progress(largest, notebook=False)
        mean = float(largest.result())
        seconds = time.perf_counter() - start
    expected = head_softmax.__wrapped__(x[:8].compute(), **inputs)
    if not float(abs(few[0] - expected).max()) <= 1e-5:
        raise SystemExit("the chunks' results differ from those of the plain function")
    print(f"\nmean of the largest probabilities: {mean:.6f}")
    print(f"{seconds:.3g} s on {len(workers)} workers, drawing included: {x.nbytes / seconds / 1e9:.3g} GB/s of x")


if __name__ == "__main__":
    main()
