"""Time the heads as PyTorch modules: `cupyfuse.torch.fuse(model)` against eager and compiled, same parameters.

The models are those of `examples/kernel_benchmark`. Unless a case says otherwise a module is used as a newcomer would:
left in training mode, gradients enabled.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import cupyfuse.heads

from . import heads, rivals
from . import options as types
from .device import Call
from .lab import Lab, run
from .report import Case, Report, Requirement
from .rivals import AUTOTUNED, BOUND, COMPILED, DROP_IN, EAGER, FUSED, Rival, as_run_by
from .tables import ERROR, case_tables, explain, findings_table

NAMES = ("head_logsumexp", "head_sum", "head_softmax")
SMALL = (64, 256)  # of the chain of one launch
DEFAULTS = heads.DEFAULTS

# The groups of the report. CHANGED shows what prepacking costs where weights change in each call.
FORWARD, CHANGED, INFERENCE = "Forward", "Forward after a change of the weight", "Inference"
BACKWARD, LAUNCH = "Forward and backward", "One launch"
NO_GRAD, WITH_GRAD = "no_grad", "with gradients"
FIGURES = {
    FORWARD: ("gpu_evicted", "gpu_back_to_back", "wall", "host"),
    CHANGED: ("gpu_evicted", "wall"),
    INFERENCE: ("gpu_evicted", "wall", "host"),
    BACKWARD: ("gpu_evicted", "wall"),
    LAUNCH: ("gpu_evicted", "wall", "host"),
}

# What float32 at the default shape must show.
_ALL, _TWO = (EAGER, COMPILED, AUTOTUNED), (EAGER, COMPILED)
_OTHERS = ("head_logsumexp", "head_softmax")
REQUIREMENTS = (
    Requirement("gpu_evicted", (FUSED,), 1.03, (BOUND,), group=FORWARD, names=NAMES),
    Requirement("gpu_evicted", (FUSED,), 200.0, _ALL, True, FORWARD, ("head_sum",)),
    Requirement("gpu_evicted", (FUSED,), 3.3 / 1.03, _ALL, True, FORWARD, _OTHERS),
    Requirement("wall", (FUSED,), 40.0, _ALL, True, FORWARD, ("head_sum",)),
    Requirement("wall", (DROP_IN,), 80.0, _ALL, True, FORWARD, ("head_sum",), "drop-in"),
    Requirement("gpu_evicted", (FUSED,), 30.0, _TWO, True, CHANGED, ("head_sum",)),
    Requirement("gpu_evicted", (FUSED,), 2.0, _TWO, True, BACKWARD),
    Requirement("error", (FUSED,), 1.0, (EAGER,), group=FORWARD),
    Requirement("error", (FUSED,), 1.0, (EAGER,), group=BACKWARD),
    Requirement("host", (FUSED,), 20.0, group=LAUNCH),
    Requirement("host", (DROP_IN,), 10.0, group=LAUNCH, names=(f"softmax, {NO_GRAD}",), way="drop-in"),
    Requirement("host", (DROP_IN,), 14.0, group=LAUNCH, names=(f"softmax, {WITH_GRAD}",), way="drop-in"),
)

# What the report says of each group, and of all.
ABOUT = {
    FORWARD: "The module as it was made: in training mode, gradients enabled. No backward pass follows.",
    CHANGED: "The same; before each call, and before the start event, `weight.mul_(1)` under `no_grad`.",
    BACKWARD: "`module(x).sum().backward()` with gradients of all parameters, none of x. Errors are those "
    "of the gradients of a sum with random weights; that of a bias before BatchNorm is zero but for noise, left out.",
    INFERENCE: "After `eval()`, under `no_grad`.",
    LAUNCH: "`torch.nn.Softmax(dim=1)` on a small matrix: what a call takes of the host.",
}
_HOW = f"""\
{ERROR}, the worst of a case's results: the output and, in
  training, the running statistics; with backward, the gradients.
- *{FUSED}*, *{EAGER}* and *{COMPILED}* share their parameters; *{DROP_IN}* is a module of
  `cupyfuse.torch` on the same memory, which needs no capture, and *{BOUND}* cupyfuse's own function on it,
  its weights bound. *MB* and *allocations* are of a call without its result."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_shape(parser)
    parser.add_argument("--dtype", choices=types.DTYPES, default="float32")
    types.add_several(parser, "--heads", NAMES)
    left_out = "leave torch.compile in this mode out (it takes minutes)"
    parser.add_argument("--no-max-autotune", dest="max_autotune", action="store_false", help=left_out)


def require_whole(module: Any) -> None:
    """Raise unless what a fused module has run so far went through cupyfuse.

    But for the counter of batches, and products that are cuBLAS's either way: those of 16 bits.
    """
    found = module.explain()
    left = [part for part in found.left if part.operations not in (("add_",), ("linear",))]
    if left or not found.fused:
        reasons = "; ".join(f"{', '.join(part.operations)}: {part.reason}" for part in left)
        raise RuntimeError(f"not all of the module is fused: {reasons or 'nothing is'}")


class Head:
    """One head: its parameters, its results and gradients in float64, and how each rival runs it."""

    def __init__(self, lab: Lab, name: str, options: argparse.Namespace):
        self._lab, self._name, self._options = lab, name, options
        self._rivals = lab.need_torch()
        self._torch = torch = self._rivals.torch
        self._source = source = self._rivals.load(name, options.shape)
        device, dtype = self._rivals.device_type(), getattr(torch, options.dtype)
        torch.manual_seed(options.seed)
        self._module = source.Model(*source.get_init_inputs()).to(device, dtype)
        self._x = source.get_inputs()[0].to(device, dtype)
        self._called: dict[str, Callable[..., Any]] = {EAGER: self._module}  # what is compiled is kept for all cases
        self._weight = next(p for p in self._module.parameters() if p.dim() == 2)
        self._initial = [b.clone() for b in self._module.buffers()]
        exact = copy.deepcopy(self._module).double()
        with torch.no_grad():
            self._inferred = [exact.eval()(self._x.double())]
        with torch.enable_grad():
            out = exact.train()(self._x.double())
            self._cotangent = torch.randn(out.shape, device=device).to(dtype)
            (out * self._cotangent.double()).sum().backward()
        self._trained = [out.detach(), *(b.double() for b in exact.buffers())]
        # BatchNorm in training makes the gradient of a bias before it zero: rivals compute rounding noise.
        noise = "gemm.bias" if self._initial else ""
        self._leaves = [p for n, p in self._module.named_parameters() if n != noise]
        self._gradients = [p.grad for n, p in exact.named_parameters() if n != noise]
        self._size = out.numel() * self._x.element_size()

    def cases(self) -> Iterator[Case]:
        """Run the head in every way."""
        for group, figures in FIGURES.items():
            if group == LAUNCH:
                continue
            training = group != INFERENCE
            rivals = (FUSED, EAGER, COMPILED)
            rivals += (AUTOTUNED,) if group == FORWARD and self._options.max_autotune else ()
            rivals += (DROP_IN,) if group in (FORWARD, INFERENCE) else ()  # its parameters are others to autograd
            for rival in (FUSED, EAGER, DROP_IN):
                self._callable(rival).train(training)
            factories = {rival: functools.partial(self.rival, group, rival) for rival in rivals}
            if group in (FORWARD, INFERENCE):  # bound weights would not notice a change, and have no gradients
                factories = {BOUND: functools.partial(self._bound, training), **factories}
            case = Case(group, self._name, self._options.shape, self._options.dtype)
            with self._torch.set_grad_enabled(training):
                run(self._lab, case, factories, figures, self._options.budget)
                if group in (FORWARD, BACKWARD) and self._rivals.device_type() == "cuda":
                    case.facts = self._memory(group == BACKWARD)
            yield case

    def rival(self, group: str, rival: str) -> Rival:
        """Return a rival in the cases of a group."""
        forward = functools.partial(self._callable(rival), self._x)
        if group == BACKWARD:
            return self._differentiated(forward)
        attempt = functools.partial(self._results, rival, forward)
        if group != CHANGED:
            return Rival(forward, [attempt, attempt], self._inferred if group == INFERENCE else self._trained)

        def attempt_after_changes() -> list[Any]:
            """Double the weight and halve it: what was folded from the first must not be used for the second."""
            self._scale_weight(2.0)
            forward()
            self._scale_weight(0.5)
            return attempt()

        return Rival(forward, [attempt_after_changes], self._trained, before=lambda: self._scale_weight(1.0))

    def _callable(self, rival: str) -> Any:
        """Return the module as a rival calls it."""
        if rival not in self._called:
            self._called[rival] = self._drop_in() if rival == DROP_IN else as_run_by(rival, self._lab, self._module)
        return self._called[rival]

    def _drop_in(self) -> Any:
        """Return the drop-in module, on the memory of the plain one's parameters and buffers."""
        made = self._source.ModelNew(*self._source.get_init_inputs())
        made.load_state_dict(self._module.state_dict(), assign=True)
        return made

    def _scale_weight(self, factor: float) -> None:
        with self._torch.no_grad():
            self._weight.mul_(factor)

    def _reset(self) -> None:
        with self._torch.no_grad():
            for buffer, initial in zip(self._module.buffers(), self._initial, strict=True):
                buffer.copy_(initial)

    def _results(self, rival: str, call: Call) -> list[Any]:
        """Call once; return the result and, in training, the running statistics, as float64 tensors."""
        self._reset()
        self._rivals.poison(self._size)
        found = [call().detach().double()]
        found += [b.double() for b in self._module.buffers()] if self._module.training else []
        if rival == FUSED:
            require_whole(self._callable(FUSED))
        return found

    def _differentiated(self, forward: Call) -> Rival:
        weighted = self._rivals.Step(lambda: (forward() * self._cotangent).sum(), self._leaves)

        def attempt() -> list[Any]:
            self._rivals.poison(self._size)
            gradients: list[Any] = weighted.results()[1:]
            return gradients

        return Rival(self._step(forward), [attempt], self._gradients)

    def _step(self, forward: Call) -> Any:
        return self._rivals.Step(lambda: forward().sum(), list(self._module.parameters()))

    def _bound(self, training: bool) -> Rival:
        """Return cupyfuse's own function on the same memory, with its weights bound."""
        self._reset()
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        shared = {"x": self._x} | {a: tensors[p] for a, p in self._rivals.parameter_names(self._name).items()}
        arguments = {name: self._rivals.as_array(tensor, self._lab.cupy) for name, tensor in shared.items()}
        product = self._lab.as_double(arguments["x"]) @ self._lab.as_double(arguments["weight"]).T
        head = cupyfuse.heads.find(self._name)
        return heads.Head(self._lab, head, arguments, product, training and bool(self._initial)).bound()

    def _memory(self, backward: bool) -> dict[str, float]:
        """Measure GPU memory of a call of the fused module and of the plain one, without its result."""
        facts = {}
        for rival in (FUSED, EAGER):
            forward = functools.partial(self._callable(rival), self._x)
            step = self._step(forward)
            step.drop_gradients()
            forward()
            found = self._rivals.measure_memory(forward)
            if backward:
                facts[f"MB kept for backward, {rival}"] = (found.kept - self._size) / 1e6
                facts[f"peak MB, {rival}"] = self._rivals.measure_memory(step).peak / 1e6
            else:
                facts[f"allocations, {rival}"] = found.allocations
                facts[f"peak MB, {rival}"] = (found.peak - self._size) / 1e6
        return facts


def _launch_factories(lab: Lab, dtype: str, with_grad: bool) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of a chain of one launch: `torch.nn.Softmax` on a small matrix."""
    torch = lab.need_torch().torch
    module = torch.nn.Softmax(dim=1)
    torch.manual_seed(0)
    x = torch.randn(SMALL).to(lab.need_torch().device_type(), getattr(torch, dtype)).requires_grad_(with_grad)
    expected = [torch.softmax(x.detach().double(), 1)]

    def make(name: str) -> Rival:
        # So small a matrix gains nothing: the host's cost is measured.
        if name == DROP_IN:
            called = rivals.drop_in_softmax()
        else:
            called = rivals.fuse(module, only_gains=False) if name == FUSED else as_run_by(name, lab, module)
        if name == FUSED:
            called(x)
            require_whole(called)
        return Rival(functools.partial(called, x), [lambda: [called(x).detach().double()]], expected)

    return {name: functools.partial(make, name) for name in (FUSED, DROP_IN, EAGER, COMPILED)}


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run the heads, then the chain of one launch."""
    torch = lab.need_torch().torch
    for name in options.heads:
        lab.release()
        yield from Head(lab, name, options).cases()
    for name in (NO_GRAD, WITH_GRAD):
        lab.release()
        case = Case(LAUNCH, f"softmax, {name}", SMALL, options.dtype)
        with torch.set_grad_enabled(name == WITH_GRAD):
            run(lab, case, _launch_factories(lab, options.dtype, name == WITH_GRAD), FIGURES[LAUNCH], options.budget)
        yield case


def report_lines(report: Report) -> list[str]:
    """Write what was asked, for float32, and a table a case."""
    asked = report.options.get("dtype") == "float32"
    lines = findings_table(REQUIREMENTS, report.cases) if asked else ["## How it was measured", ""]
    lines += explain(FIGURES[FORWARD], _HOW)
    return [*lines, *case_tables(report, EAGER, ["gpu_evicted"], ABOUT)]
