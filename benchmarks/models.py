"""Whole models, inference and training steps: eager, compiled, and through `cupyfuse.torch`; also as CUDA graphs.

A case is one model in one setting (dtype and precision of float32 products), mode and batch. All rivals of a case share
one module's parameters. Each is called a few times, compared with the same module in float64, and then timed in turn
with the others.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from .lab import COMPILED, EAGER, Lab, Rival, Unavailable, run
from .networks import LARGE, NETWORKS, SMALL, Network
from .options import names
from .report import OUT_OF_TIME, Case, Result
from .timing import describe
from .verdicts import Requirement

FUSED, BACKEND = "cupyfuse.torch.fuse", "cupyfuse backend"
FUSED_GRAPHS, BACKEND_GRAPHS, COMPILED_GRAPHS = f"{FUSED}, graphs", f"{BACKEND}, graphs", f"{COMPILED}, graphs"
RIVALS = {
    "eager": EAGER,
    "fuse": FUSED,
    "backend": BACKEND,
    "compile": COMPILED,
    "fuse-graphs": FUSED_GRAPHS,
    "backend-graphs": BACKEND_GRAPHS,
    "compile-graphs": COMPILED_GRAPHS,
}

# A setting's name: its dtype, and the precision of float32 matrix products.
SETTINGS = {"float32": ("float32", "highest"), "float32-high": ("float32", "high"), "bfloat16": ("bfloat16", "highest")}
INFERENCE, TRAINING = "inference", "training"
MODES = (INFERENCE, TRAINING)
BATCHES = (LARGE, SMALL)
FIGURES = ("gpu_queued", "wall_loop")
DEFAULTS = {"budget": (0.5, 0.1)}  # GPU seconds for each rival and figure

# Ours are not to be slower than what they replace; up to 1.02 times is noise.
REQUIREMENTS = tuple(
    Requirement(figure, (ours,), 1.02, (other,))
    for ours, other in (
        (FUSED, EAGER),
        (BACKEND, COMPILED),
        (FUSED_GRAPHS, COMPILED_GRAPHS),
        (BACKEND_GRAPHS, COMPILED_GRAPHS),
    )
    for figure in FIGURES
)

WARM_UP = 4  # calls before the one that is compared: graphs are captured in the second or third
LEARNING_RATE = 1e-6  # every step writes every weight, and they stay about what they were
# A result is wrong, and not timed, from this many times eager's error on, and eager's counts as this much at least.
WRONG, LEAST = 20.0, {"float32": 1e-6, "float32-high": 1e-4, "bfloat16": 2e-3}


def add_options(parser: argparse.ArgumentParser) -> None:
    for option, known in (
        ("models", NETWORKS),
        ("dtypes", SETTINGS),
        ("modes", MODES),
        ("batches", BATCHES),
        ("rivals", RIVALS),
    ):
        every = tuple(known)
        parser.add_argument(
            f"--{option}", type=names(every), default=every, metavar="NAME,...", help=f"of {', '.join(every)}"
        )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after so long")
    parser.add_argument("--add", action="store_true", help="keep the cases of earlier runs that this one leaves out")
    parser.add_argument("--tiny", action="store_true", help="tiny configurations, to try the benchmark itself")


class Trial:
    """One case: the module, its inputs, what it should compute, and how each rival runs it."""

    def __init__(self, lab: Lab, network: Network, options: argparse.Namespace, setting: str, mode: str, batch: str):
        self._lab, self._network, self._setting, self._training = lab, network, setting, mode == TRAINING
        self._rivals = lab.need_torch()
        self._torch = torch = self._rivals.torch
        place, dtype = self._rivals.device_type(), getattr(torch, SETTINGS[setting][0])
        torch.manual_seed(options.seed)
        with torch.device(place):
            module = network.build(options.tiny)
            given = network.inputs(network.batches[batch], options.tiny)
        self._module = module.to(dtype).train(self._training)
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
        self._labels = given.pop("labels", None)
        self._inputs = given
        if self._training and network.result and self._labels is not None:
            self._inputs = {**given, "labels": self._labels}
        self.shape = tuple(next(iter(given.values())).shape)
        exact = copy.deepcopy(self._module).double()
        wide = {k: v.double() if v.is_floating_point() else v for k, v in self._inputs.items()}
        self._expected = self._results(exact, wide)
        del exact
        self._initial = [t.detach().clone() for t in self._tensors()] if self._training else []
        if self._training:
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=place == "cuda")
            self._step(self._module)  # the optimizer's own state counts as the model's
            self._reset()

    def _tensors(self) -> list[Any]:
        return [*self._module.parameters(), *self._module.buffers()]

    # What is computed
    def _results(self, called: Any, inputs: dict[str, Any]) -> list[Any]:
        """Return the output or, in training, the loss and all gradients as one, in float64."""
        torch = self._torch
        if not self._training:
            with torch.no_grad():
                return [self._network.output(called(**inputs)).double()]
        parameters = [p for p in called.parameters() if p.requires_grad]
        loss = self._differentiate(called, inputs)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        return [loss.detach().double(), torch.cat([g.double().flatten() for g in gradients])]

    def _differentiate(self, called: Any, inputs: dict[str, Any]) -> Any:
        with self._torch.enable_grad():
            loss = self._network.loss(called(**inputs), self._labels)
            loss.backward()
        return loss

    def _step(self, called: Any) -> None:
        self._differentiate(called, self._inputs)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _infer(self, called: Any) -> None:
        with self._torch.no_grad():
            called(**self._inputs)

    def _reset(self) -> None:
        """Restore the first weights; drop the gradients."""
        with self._torch.no_grad():
            for tensor, initial in zip(self._tensors(), self._initial, strict=False):
                tensor.copy_(initial)
        for parameter in self._module.parameters():
            parameter.grad = None

    # The rivals
    def _build(self, rival: str) -> Any:
        """Return the module as a rival runs it, nothing compiled yet."""
        if rival == EAGER:
            return self._module
        if rival in (FUSED, FUSED_GRAPHS):
            import cupyfuse.torch

            fuse: Callable[..., Any] = cupyfuse.torch.fuse
            return fuse(self._module, graphs=True) if rival == FUSED_GRAPHS else fuse(self._module)
        backend = "cupyfuse" if rival in (BACKEND, BACKEND_GRAPHS) else "inductor"
        mode = "reduce-overhead" if rival in (COMPILED_GRAPHS, BACKEND_GRAPHS) else "default"
        return self._lab.need_torch(compiling=True).compile_static(self._module, mode, backend)

    def rival(self, name: str, case: Case, deadline: float) -> Rival:
        """Build a rival and call it a few times; enter what its first calls took into the case's facts."""
        if time.monotonic() >= deadline:
            raise Unavailable(OUT_OF_TIME)
        self._reset()
        self._lab.device.synchronize()
        allocated, reserved = self._rivals.memory_held()
        began = time.perf_counter()
        called = self._build(name)
        once = self._step if self._training else self._infer

        def call() -> None:
            if name in (COMPILED_GRAPHS, BACKEND_GRAPHS):
                self._torch.compiler.cudagraph_mark_step_begin()
            once(called)

        call()
        self._lab.device.synchronize()
        case.facts[f"first call s, {name}"] = time.perf_counter() - began
        for _ in range(WARM_UP - 1):
            call()
        self._lab.device.synchronize()
        peak = self._rivals.peak_memory(call) - allocated
        kept = self._rivals.memory_held()[1] - reserved
        if self._rivals.device_type() == "cuda":
            case.facts |= {f"peak MB, {name}": peak / 1e6, f"kept MB, {name}": kept / 1e6}

        def attempt() -> list[Any]:
            self._reset()
            found = self._results(called, self._inputs)
            self._reset()
            return found

        eager = case.value(EAGER, "error")
        limit = WRONG * max(eager, LEAST[self._setting]) if eager is not None and name != EAGER else math.inf
        return Rival(call, [attempt], self._expected, limit=limit)


def group_title(mode: str, setting: str) -> str:
    """Return the heading of the cases of a mode and a setting."""
    dtype, precision = SETTINGS[setting]
    words = f'{dtype} at "{precision}"' if dtype == "float32" else dtype
    return f"{'Inference' if mode == INFERENCE else 'Training step'}, {words}"


def _measure(lab: Lab, case: Case, options: argparse.Namespace, trial: Trial, deadline: float) -> None:
    case.shape = trial.shape
    chosen = [RIVALS[name] for name in options.rivals]
    factories = {rival: functools.partial(trial.rival, rival, case, deadline) for rival in chosen}
    run(lab, case, factories, FIGURES, options.budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run everything that the options ask for, every model once before any of them again.

    Where a model cannot be built, or the time is over, all rivals of the case fail with the reason.
    """
    rivals = lab.need_torch()
    deadline = time.monotonic() + options.seconds
    for setting, mode, batch, name in itertools.product(options.dtypes, options.modes, options.batches, options.models):
        network, (dtype, precision) = NETWORKS[name], SETTINGS[setting]
        case = Case(group_title(mode, setting), f"{name}, {batch}", (network.batches[batch],), dtype)
        failure = OUT_OF_TIME if time.monotonic() >= deadline else ""
        if not failure:
            lab.release()
            try:
                with rivals.matmul_precision(precision):
                    _measure(lab, case, options, Trial(lab, network, options, setting, mode, batch), deadline)
            except Exception as error:
                failure = describe(error)
        if failure:
            case.results = [Result(RIVALS[rival], failure=failure) for rival in options.rivals]
        yield case
