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
from .rivals import AUTOTUNED, BOUND, COMPILED, EAGER, FUSED, Rival, as_run_by
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
    Requirement("wall", (FUSED,), 80.0, _ALL, True, FORWARD, ("head_sum",)),
    Requirement("gpu_evicted", (FUSED,), 30.0, _TWO, True, CHANGED, ("head_sum",)),
    Requirement("gpu_evicted", (FUSED,), 2.0, _TWO, True, BACKWARD),
    Requirement("error", (FUSED,), 1.0, (EAGER,), group=FORWARD),
    Requirement("error", (FUSED,), 1.0, (EAGER,), group=BACKWARD),
    Requirement("host", (FUSED,), 20.0, group=LAUNCH),
)

# What the report says of each group, and of all.
ABOUT = {
    FORWARD: "The module as it was made: in training mode, gradients enabled. No backward pass follows.",
    CHANGED: "The same; before each call, and before the start event, `weight.add_(0)` under `no_grad`.",
    BACKWARD: "`module(x).sum().backward()` with gradients of all parameters, none of x. Errors are those "
    "of the gradients of a sum with random weights; that of a bias before BatchNorm is zero but for noise, left out.",
    INFERENCE: "After `eval()`, under `no_grad`.",
    LAUNCH: "`torch.nn.Softmax(dim=1)` on a small matrix: what a call takes of the host.",
}
_HOW = f"""\
{ERROR}, the worst of a case's results: the output and, in
  training, the running statistics; with backward, the gradients.
- *{FUSED}*, *{EAGER}* and *{COMPILED}* share their parameters; *{BOUND}* is cupyfuse's own
  function on the same memory, its weights bound. *MB* and *allocations* are of a call without its result."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_shape(parser)
    parser.add_argument("--dtype", choices=types.DTYPES, default="float32")
    types.add_several(parser, "--heads", NAMES)
    left_out = "leave torch.compile in this mode out (it takes minutes)"
    parser.add_argument("--no-max-autotune", dest="max_autotune", action="store_false", help=left_out)


def require_whole(module: Any) -> None:
    """Raise unless all that a fused module has run so far went through cupyfuse."""
    found = module.explain()
    left = [part for part in found.left if part.operations != ("add_",)]  # the counter of batches
    if left or not found.fused:
        reasons = "; ".join(f"{', '.join(part.operations)}: {part.reason}" for part in left)
        raise RuntimeError(f"not all of the module is fused: {reasons or 'nothing is'}")


class Head:
    """One head: its parameters, its results and gradients in float64, and how each rival runs it."""

    def __init__(self, lab: Lab, name: str, options: argparse.Namespace):
        self._lab, self._name, self._options = lab, name, options
        self._torch = lab.need_torch()
        torch = self._torch.torch
        source = self._torch.load(name, options.shape)
        device, dtype = self._torch.device_type(), getattr(torch, options.dtype)
        torch.manual_seed(options.seed)
        self._module = source.Model(*source.get_init_inputs()).to(device, dtype)
        self._x = source.get_inputs()[0].to(device, dtype)
        self._fused = as_run_by(FUSED, lab, self._module)
        self._called: dict[str, Callable[..., Any]] = {FUSED: self._fused}  # compiled ones are kept from case to case
        self._parameters = dict(self._module.named_parameters())
        self._weight = next(p for p in self._module.parameters() if p.dim() == 2)
        self._initial = [b.clone() for b in self._module.buffers()]
        exact = copy.deepcopy(self._module).double()
        with torch.no_grad():
            self._inferred = [exact.eval()(self._x.double())]
        with torch.enable_grad():
            out = exact.train()(self._x.double())
            self._cotangent = torch.randn(out.shape, device=device).to(dtype)
            (out * self._cotangent.double()).sum().backward()
        self._expected = [out.detach(), *(b.double() for b in exact.buffers())]
        # BatchNorm in training makes the gradient of a bias before it zero: rivals compute rounding noise.
        self._gradients = {n: p.grad for n, p in exact.named_parameters() if not (self._initial and n == "gemm.bias")}
        self._size = out.numel() * self._x.element_size()

    def cases(self) -> Iterator[Case]:
        """Run the head in every way."""
        torch = self._torch.torch
        autotuned = (AUTOTUNED,) if self._options.max_autotune else ()
        for group, make, more, with_bound in (
            (FORWARD, self._forward, autotuned, True),
            (CHANGED, self._changed, (), False),  # bound weights would not notice
            (BACKWARD, self._differentiated, (), False),  # functions of NumPy code have no gradients
            (INFERENCE, self._forward, (), True),
        ):
            training = group != INFERENCE
            for module in (self._module, self._fused):
                module.train(training)
            factories = {rival: functools.partial(make, rival) for rival in (FUSED, EAGER, COMPILED, *more)}
            if with_bound:
                factories = {BOUND: functools.partial(self._bound, training), **factories}
            case = Case(group, self._name, self._options.shape, self._options.dtype)
            with torch.set_grad_enabled(training):
                run(self._lab, case, factories, FIGURES[group], self._options.budget)
                if group in (FORWARD, BACKWARD):
                    case.facts.update(self._memory(group == BACKWARD))
            yield case

    # The rivals
    def _callable(self, rival: str) -> Callable[..., Any]:
        """Return the module as a rival calls it."""
        if rival not in self._called:
            self._called[rival] = as_run_by(rival, self._lab, self._module)
        return self._called[rival]

    def _reset(self) -> None:
        with self._torch.torch.no_grad():
            for buffer, initial in zip(self._module.buffers(), self._initial, strict=True):
                buffer.copy_(initial)

    def _results(self, rival: str, call: Call) -> list[Any]:
        """Call once; return the result and, in training, the running statistics, as float64 tensors."""
        self._reset()
        self._torch.poison(self._size)
        found = [call().detach().double()]
        found += [b.double() for b in self._module.buffers()] if self._module.training else []
        if rival == FUSED:
            require_whole(self._fused)
        return found

    def _forward(self, rival: str) -> Rival:
        call = functools.partial(self._callable(rival), self._x)
        expected = self._expected if self._module.training else self._inferred
        return Rival(call, [functools.partial(self._results, rival, call)] * 2, expected)

    def _changed(self, rival: str) -> Rival:
        call = functools.partial(self._callable(rival), self._x)
        torch = self._torch.torch

        def attempt() -> list[Any]:
            """Double the weight and halve it: what was folded from the first must not be used for the second."""
            with torch.no_grad():
                self._weight.mul_(2)
            call()
            with torch.no_grad():
                self._weight.mul_(0.5)
            return self._results(rival, call)

        def before() -> None:
            with torch.no_grad():
                self._weight.add_(0)

        return Rival(call, [attempt], self._expected, before=before)

    def _differentiated(self, rival: str) -> Rival:
        called = self._callable(rival)

        def call() -> None:
            self._drop_gradients()
            called(self._x).sum().backward()

        def attempt() -> list[Any]:
            self._drop_gradients()
            self._torch.poison(self._size)
            (called(self._x) * self._cotangent).sum().backward()
            return [self._parameters[name].grad.double() for name in self._gradients]

        return Rival(call, [attempt], list(self._gradients.values()))

    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _bound(self, training: bool) -> Rival:
        """Return cupyfuse's own function on the same memory, with its weights bound."""
        lab = self._lab
        self._reset()
        tensors = {**self._parameters, **dict(self._module.named_buffers())}
        shared = {"x": self._x} | {a: tensors[p] for a, p in self._torch.parameter_names(self._name).items()}
        arguments = {name: self._torch.as_array(tensor, lab.cupy) for name, tensor in shared.items()}
        product = lab.as_double(arguments["x"]) @ lab.as_double(arguments["weight"]).T
        head = cupyfuse.heads.find(self._name)
        return heads.Head(lab, head, arguments, product, training and bool(self._initial)).bound()

    def _memory(self, backward: bool) -> dict[str, float]:
        """Measure GPU memory of a call of the fused module and of the plain one; empty without a GPU."""
        facts = {}
        for rival, module in ((FUSED, self._fused), (EAGER, self._module)):
            self._drop_gradients()
            found = self._torch.measure_memory(functools.partial(module, self._x), backward)
            facts |= {f"{what}, {rival}": value for what, value in found.items()}
        return facts


def _launch_factories(lab: Lab, dtype: str, with_grad: bool) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of a chain of one launch: `torch.nn.Softmax` on a small matrix."""
    torch = lab.need_torch().torch
    module = torch.nn.Softmax(dim=1)
    torch.manual_seed(0)
    x = torch.randn(SMALL).to(lab.need_torch().device_type(), getattr(torch, dtype)).requires_grad_(with_grad)
    expected = [torch.softmax(x.detach().double(), 1)]

    def rival(called: Callable[..., Any]) -> Rival:
        return Rival(functools.partial(called, x), [lambda: [called(x).detach().double()]], expected)

    def ours() -> Rival:
        called = rivals.fuse(module, only_gains=False)  # so small a matrix gains nothing: the host's cost is measured
        called(x)
        require_whole(called)
        return rival(called)

    return {FUSED: ours, **{name: lambda name=name: rival(as_run_by(name, lab, module)) for name in (EAGER, COMPILED)}}


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
