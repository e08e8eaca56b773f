"""Whole models, inference and training steps: eager, compiled, and through `cupyfuse.torch`; also as CUDA graphs.

A case is one model in one setting (dtype and precision of float32 products), mode and batch. All rivals of a case share
one module's parameters. Each is called a few times, compared with the same module in float64, and then timed in turn
with the others.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import heads
from .cases import Lab, Unavailable
from .networks import LARGE, NETWORKS, SMALL, Network
from .report import OUT_OF_TIME, Case, Result
from .timing import Contest, describe

EAGER, COMPILED = heads.EAGER, heads.COMPILED
FUSED, BACKEND = "cupyfuse.torch.fuse", "cupyfuse backend"
REDUCED, GRAPHED = f"{COMPILED}, graphs", f"{FUSED}, graphs"
REDUCED_BACKEND = f"{BACKEND}, graphs"
RIVALS = {
    "eager": EAGER,
    "fuse": FUSED,
    "backend": BACKEND,
    "compile": COMPILED,
    "fuse-graphs": GRAPHED,
    "backend-graphs": REDUCED_BACKEND,
    "compile-graphs": REDUCED,
}

# A setting's name: its dtype, and the precision of float32 matrix products.
SETTINGS = {"float32": ("float32", "highest"), "float32-high": ("float32", "high"), "bfloat16": ("bfloat16", "highest")}
INFERENCE, TRAINING = "inference", "training"
MODES = (INFERENCE, TRAINING)
BATCHES = (LARGE, SMALL)
FIGURES = ("gpu_queued", "wall_loop")

WARM_UP = 4  # calls before the one that is compared: graphs are recorded in the second or third
LEARNING_RATE = 1e-6  # every step writes every weight, and they stay about what they were
# A result is wrong, and not timed, from this many times eager's error on, and eager's counts as this much at least.
WRONG, LEAST = 20.0, {"float32": 1e-6, "float32-high": 1e-4, "bfloat16": 2e-3}
_MB = 1e6


@dataclass(frozen=True)
class Options:
    """What to run: names of networks, settings, modes, batches and rivals, and for how long.

    Attributes
    ----------
    seconds : float
        After so many no rival is begun any more.
    tiny : bool
        Whether to run the tiny variants.
    """

    models: tuple[str, ...] = tuple(NETWORKS)
    settings: tuple[str, ...] = tuple(SETTINGS)
    modes: tuple[str, ...] = MODES
    batches: tuple[str, ...] = BATCHES
    rivals: tuple[str, ...] = tuple(RIVALS)
    seconds: float = math.inf
    quick: bool = False
    tiny: bool = False
    seed: int = 0

    @property
    def budget(self) -> float:
        """GPU seconds for each rival and figure."""
        return 0.1 if self.quick else 0.5


class Trial:
    """One case: the module, its inputs, what it should compute, and how each rival runs it.

    Parameters
    ----------
    lab : Lab
    network : Network
    options : Options
    setting, mode, batch : str
    """

    def __init__(self, lab: Lab, network: Network, options: Options, setting: str, mode: str, batch: str):
        self._lab, self._network, self._training = lab, network, mode == TRAINING
        self._rivals = lab.need_torch()
        self._torch = torch = self._rivals.torch
        place, dtype = self._rivals.place(), getattr(torch, SETTINGS[setting][0])
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
        self._expected = self._reference()
        self._initial = [t.detach().clone() for t in self._tensors()] if self._training else []
        if self._training:
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=place == "cuda")
            self._step(self._module)  # the optimizer's own state counts as the model's
            self._forget()

    def _tensors(self) -> list[Any]:
        return [*self._module.parameters(), *self._module.buffers()]

    def _reference(self) -> list[Any]:
        """What the module computes in float64."""
        exact = copy.deepcopy(self._module).double()
        wide = {k: v.double() if v.is_floating_point() else v for k, v in self._inputs.items()}
        return self._results(exact, wide)

    # What is computed
    def _results(self, called: Any, inputs: dict[str, Any]) -> list[Any]:
        """The output, or in training the loss and all gradients as one, in float64."""
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

    def _forget(self) -> None:
        """The first weights again, and no gradients."""
        with self._torch.no_grad():
            for tensor, initial in zip(self._tensors(), self._initial, strict=False):
                tensor.copy_(initial)
        for parameter in self._module.parameters():
            parameter.grad = None

    # The rivals
    def _made(self, rival: str) -> Any:
        """The module as a rival runs it, nothing compiled yet."""
        if rival == EAGER:
            return self._module
        if rival in (FUSED, GRAPHED):
            import cupyfuse.torch

            fuse: Callable[..., Any] = cupyfuse.torch.fuse
            return fuse(self._module, graphs=True) if rival == GRAPHED else fuse(self._module)
        backend = "cupyfuse" if rival in (BACKEND, REDUCED_BACKEND) else "inductor"
        mode = "reduce-overhead" if rival in (REDUCED, REDUCED_BACKEND) else "default"
        return self._lab.need_compiler().compiled(self._module, mode, backend)

    def enter(self, rival: str, facts: dict[str, float]) -> tuple[Callable[[], None], float]:
        """Make a rival and call it; gives the call to time, and its error. `facts` get what the first calls took."""
        self._forget()
        self._lab.device.synchronize()
        allocated, reserved = self._rivals.held()
        began = time.perf_counter()
        called = self._made(rival)
        once = self._step if self._training else self._infer

        def call() -> None:
            if rival in (REDUCED, REDUCED_BACKEND):
                self._torch.compiler.cudagraph_mark_step_begin()
            once(called)

        call()
        self._lab.device.synchronize()
        facts[f"first call s, {rival}"] = time.perf_counter() - began
        for _ in range(WARM_UP - 1):
            call()
        self._lab.device.synchronize()
        peak = self._rivals.peak(call) - allocated
        kept = self._rivals.held()[1] - reserved
        if self._rivals.place() == "cuda":
            facts |= {f"peak MB, {rival}": peak / _MB, f"kept MB, {rival}": kept / _MB}
        self._forget()
        error = self._error(self._results(called, self._inputs))
        self._forget()
        return call, error

    def _error(self, found: list[Any]) -> float:
        """The worst ||result - expected|| / ||expected||."""
        errors = []
        for result, expected in zip(found, self._expected, strict=True):
            if result.shape != expected.shape:
                raise RuntimeError(f"the result has shape {tuple(result.shape)}, expected {tuple(expected.shape)}")
            errors.append(float((result - expected).norm() / expected.norm()))
        return next((e for e in errors if not math.isfinite(e)), max(errors))


def run(lab: Lab, case: Case, trial: Trial, options: Options, setting: str, deadline: float) -> None:
    """Check and time the rivals of a case, and enter their results into it."""
    calls: dict[str, Callable[[], None]] = {}
    limit = math.inf
    for rival in (RIVALS[name] for name in options.rivals):
        result = Result(rival)
        case.results.append(result)
        if time.monotonic() >= deadline:
            result.failure = OUT_OF_TIME
            continue
        try:
            call, error = trial.enter(rival, case.facts)
        except Unavailable as reason:
            result.failure = str(reason)
        except Exception as reason:
            result.failure = describe(reason)
        else:
            result.error = error if math.isfinite(error) else None
            if rival == EAGER and result.error is not None:
                limit = WRONG * max(result.error, LEAST[setting])
            if error <= limit and math.isfinite(error):
                calls[rival] = call
            else:
                result.failure = f"wrong result: relative error {error:.3g}"
    contest = Contest(lab.device, calls, options.budget)
    for figure in FIGURES:
        for rival, summary in getattr(contest, figure.removeprefix("gpu_"))().items():
            found = case.find(rival)
            assert found is not None
            found.times[figure] = summary
    for result in case.results:
        result.failure = contest.failures.get(result.rival, result.failure)


def _measure(lab: Lab, case: Case, options: Options, chosen: tuple[str, str, str], deadline: float) -> None:
    """Build the model of a case and run its rivals; nothing of it is left in memory afterwards."""
    trial = Trial(lab, NETWORKS[case.name.partition(",")[0]], options, *chosen)
    case.shape = trial.shape
    run(lab, case, trial, options, chosen[0], deadline)


def title(mode: str, setting: str) -> str:
    """The heading under which the cases of a mode and a setting stand."""
    dtype, precision = SETTINGS[setting]
    words = f'{dtype} at "{precision}"' if dtype == "float32" else dtype
    return f"{'Inference' if mode == INFERENCE else 'Training step'}, {words}"


def cases(lab: Lab, options: Options) -> Iterator[Case]:
    """Run everything that the options ask for, every model once before any of them again.

    What cannot be built is a case whose rivals all failed; what there is no time for, one whose rivals say so.
    """
    torch = lab.need_torch().torch
    deadline = time.monotonic() + options.seconds
    todo = [(s, m, b, n) for s in options.settings for m in options.modes for b in options.batches
            for n in options.models]  # fmt: skip
    before = torch.get_float32_matmul_precision()
    for setting, mode, batch, name in todo:
        network = NETWORKS[name]
        case = Case(title(mode, setting), f"{name}, {batch}", (network.batches[batch],), SETTINGS[setting][0])
        began = time.monotonic()
        failure = OUT_OF_TIME if began >= deadline else ""
        if not failure:
            lab.release()
            torch.set_float32_matmul_precision(SETTINGS[setting][1])
            try:
                _measure(lab, case, options, (setting, mode, batch), deadline)
            except Exception as error:
                failure = describe(error)
            finally:
                torch.set_float32_matmul_precision(before)
            print(f"{case.group}: {case.name}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        if failure:
            case.results = [Result(RIVALS[rival], failure=failure) for rival in options.rivals]
        yield case
