"""Every example script runs as a reader would run it; each checks its own results and fails by itself."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support import ROOT

EXAMPLES = ROOT / "examples"
# examples/heads is a package, which scripts import.
SCRIPTS = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("[a-z]*.py")
    if path.name != "common.py" and path.parent.name != "heads"
)
KERNEL_BENCHMARK = sorted((EXAMPLES / "kernel_benchmark").glob("*.py"))


def test_there_are_examples() -> None:
    assert {"quickstart.py", "head_logsumexp.py", "head_sum.py", "head_softmax.py"} <= set(SCRIPTS)
    assert {"torch_model.py", "torch_compile.py", "torch_cuda_graph.py", "jax_dlpack.py"} <= set(SCRIPTS)
    assert {"language_model_loss.py", "softmax_regression.py", "dask_rows.py"} <= set(SCRIPTS)
    assert {path.name for path in KERNEL_BENCHMARK} == {"head_logsumexp.py", "head_sum.py", "head_softmax.py"}


@pytest.mark.rotates
@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_plot_of_memory(tmp_path: Any) -> None:
    """Of memory over the number of classes; without matplotlib an error says that there is none."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    file = tmp_path / "memory.png"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "softmax_regression.py"), "--plot", str(file)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg"},
    )
    assert done.stdout
    if importlib.util.find_spec("matplotlib") is None:
        assert done.returncode == 1 and "--plot needs matplotlib" in done.stderr
    else:
        assert done.returncode == 0 and file.stat().st_size, done.stderr


# Kernel benchmarks load a file by its path and look for four names in it ---------------------------------------------


@pytest.fixture(params=KERNEL_BENCHMARK, ids=lambda path: path.stem)
def loaded(request: pytest.FixtureRequest) -> Any:
    spec = importlib.util.spec_from_file_location(f"kernel_benchmark_{request.param.stem}", request.param)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_benchmark_finds_what_it_expects(loaded: Any) -> None:
    assert (loaded.batch_size, loaded.in_features, loaded.out_features) == (1024, 8192, 8192)
    assert loaded.get_init_inputs()[:2] == [8192, 8192]
    signatures = [inspect.signature(kind) for kind in (loaded.Model, loaded.ModelNew)]
    # The fused one may take more: device, dtype.
    for wanted, found in zip(*(signature.parameters.values() for signature in signatures), strict=False):
        assert (wanted.name, wanted.default) == (found.name, found.default)
    assert len(signatures[0].parameters) <= len(signatures[1].parameters)


def test_a_kernel_benchmark_finds_the_same_weights_and_results(loaded: Any) -> None:
    """As it is done there: a seed, the model, a seed, the other model, inputs, several calls of both."""
    loaded.batch_size, loaded.in_features, loaded.out_features = 12, 40, 56
    models, draws = [], []
    for kind in (loaded.Model, loaded.ModelNew):
        torch.manual_seed(7)
        models.append(kind(*loaded.get_init_inputs()))
        draws.append(torch.rand(1))
    plain, fused = models
    assert torch.equal(*draws)  # nothing more was drawn by either
    assert list(plain.state_dict()) == list(fused.state_dict())
    for wanted, found in zip(plain.state_dict().values(), fused.state_dict().values(), strict=True):
        assert torch.equal(wanted, found)
    fused.load_state_dict(plain.state_dict())
    for _ in range(3):
        (x,) = loaded.get_inputs()
        assert x.shape == (12, 40)
        wanted, found = plain(x), fused(x)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.requires_grad
        # 40 terms below one in float32, summed in another order; in `head_sum` 56 such sums.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert len(fused.explain().fused) == 1 and not fused.explain().left
