"""The heads as PyTorch modules: `cupyfuse.torch.fuse(model)` beside eager and compiled ones, on the same parameters.

The models are those of `examples/kernel_benchmark`. Unless a case says otherwise a module is used as a newcomer would:
left in training mode, gradients enabled.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupyfuse.heads

from . import heads
from .cases import Lab, Rival, run
from .device import Call
from .report import Case

MODELS = Path(__file__).resolve().parent.parent / "examples" / "kernel_benchmark"
NAMES = ("head_logsumexp", "head_sum", "head_softmax")
SMALL = (64, 256)  # of the chain of one launch

FUSED = "cupyfuse.torch.fuse"
BOUND, EAGER, COMPILED, AUTOTUNED = heads.BOUND, heads.EAGER, heads.COMPILED, heads.AUTOTUNED

FORWARD = "Forward"
CHANGED = "Forward after a change of the weight"
INFERENCE = "Inference"
BACKWARD = "Forward and backward"
LAUNCH = "One launch"
FIGURES = {
    FORWARD: ("gpu_evicted", "gpu_back_to_back", "wall", "host"),
    CHANGED: ("gpu_evicted", "wall"),
    INFERENCE: ("gpu_evicted", "wall", "host"),
    BACKWARD: ("gpu_evicted", "wall"),
    LAUNCH: ("gpu_evicted", "wall", "host"),
}
NO_GRAD, WITH_GRAD = "no_grad", "with gradients"


@dataclass(frozen=True)
class Options(heads.Options):
    """What to run: `shape` is (B, K, N)."""

    max_autotune: bool = True


def load(name: str, shape: tuple[int, int, int]) -> Any:
    """The module of a kernel benchmark, for a shape (B, K, N)."""
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.batch_size, module.in_features, module.out_features = shape
    return module


def fused(module: Any, **options: Any) -> Any:
    """`cupyfuse.torch.fuse(module)`; calls of it are to leave nothing to PyTorch, which `whole` looks at."""
    from cupyfuse.torch import fuse

    return fuse(module, **options)


def whole(module: Any) -> None:
    """Raise unless all that a fused module has run so far went through cupyfuse."""
    told = module.explain()
    left = [part for part in told.left if part.operations != ("add_",)]  # the counter of batches
    if left or not told.fused:
        reasons = "; ".join(f"{', '.join(part.operations)}: {part.reason}" for part in left)
        raise RuntimeError(f"not all of the module is fused: {reasons or 'nothing is'}")


class Head:
    """One head: its parameters, and how each rival runs it.

    Parameters
    ----------
    lab : Lab
    name : str
        Of the head.
    options : Options
    """

    def __init__(self, lab: Lab, name: str, options: Options):
        self._lab, self._name, self._options = lab, name, options
        self._torch = lab.need_torch()
        torch = self._torch.torch
        source = load(name, options.shape)
        place, dtype = self._torch.place(), getattr(torch, options.dtype)
        torch.manual_seed(options.seed)
        self._module = source.Model(*source.get_init_inputs()).to(place, dtype)
        self._x = source.get_inputs()[0].to(place, dtype)
        self._fused = fused(self._module)
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._parameters = dict(self._module.named_parameters())
        self._weight = next(p for p in self._module.parameters() if p.dim() == 2)
        self._initial = [b.clone() for b in self._module.buffers()]
        exact = copy.deepcopy(self._module).double()
        with torch.no_grad():
            self._inferred = [exact.eval()(self._x.double())]
        with torch.enable_grad():
            out = exact.train()(self._x.double())
            self._cotangent = torch.randn(out.shape, device=place).to(dtype)
            (out * self._cotangent.double()).sum().backward()
        self._expected = [out.detach(), *(b.double() for b in exact.buffers())]
        self._gradients = {n: p.grad for n, p in exact.named_parameters() if n in self._differentiable()}
        self._bytes = out.numel() * self._x.element_size()

    def _differentiable(self) -> list[str]:
        """Parameters with gradients; of a bias before BatchNorm in training it is zero, and what is computed noise."""
        return [n for n in self._parameters if not (self._initial and n == "gemm.bias")]

    def cases(self) -> Iterator[Case]:
        """Run the head in every way."""
        torch = self._torch.torch
        for group, makers, graded in (
            (FORWARD, self._forward(), True),
            (CHANGED, self._changed(), True),
            (BACKWARD, self._backward(), True),
            (INFERENCE, self._inference(), False),
        ):
            for module in (self._module, self._fused):
                module.train(group != INFERENCE)
            case = Case(group, self._name, self._options.shape, self._options.dtype)
            with torch.set_grad_enabled(graded):
                run(self._lab, case, makers, FIGURES[group], self._options.budget)
                if group in (FORWARD, BACKWARD):
                    case.facts.update(self._facts(group))
            yield case

    # The rivals
    def _callable(self, rival: str) -> Callable[..., Any]:
        """The module as a rival calls it; compiled ones are kept from case to case."""
        if rival in (FUSED, EAGER):
            return self._fused if rival == FUSED else self._module
        if rival not in self._compiled:
            mode = "max-autotune" if rival == AUTOTUNED else "default"
            self._compiled[rival] = self._lab.need_compiler().compiled(self._module, mode)
        return self._compiled[rival]

    def _reset(self) -> None:
        with self._torch.torch.no_grad():
            for buffer, initial in zip(self._module.buffers(), self._initial, strict=True):
                buffer.copy_(initial)

    def _rivals(self, make: Callable[[str], Rival], *names: str) -> dict[str, Callable[[], Rival]]:
        return {name: functools.partial(make, name) for name in (FUSED, EAGER, COMPILED, *names)}

    def _forward(self) -> dict[str, Callable[[], Rival]]:
        more = (AUTOTUNED,) if self._options.max_autotune else ()
        return {BOUND: functools.partial(self._bound, True), **self._rivals(self._called, *more)}

    def _inference(self) -> dict[str, Callable[[], Rival]]:
        return {BOUND: functools.partial(self._bound, False), **self._rivals(self._inferring)}

    def _changed(self) -> dict[str, Callable[[], Rival]]:
        return self._rivals(self._changing)

    def _backward(self) -> dict[str, Callable[[], Rival]]:
        return self._rivals(self._differentiating)

    def _results(self, rival: str, call: Call) -> list[Any]:
        """What a call gives, and what it leaves in the running statistics, as float64 tensors."""
        self._reset()
        self._torch.poison(self._bytes)
        found = [call().detach().double()]
        found += [b.double() for b in self._module.buffers()] if self._module.training else []
        if rival == FUSED:
            whole(self._fused)
        return found

    def _called(self, rival: str) -> Rival:
        call = functools.partial(self._callable(rival), self._x)
        return Rival(call, [functools.partial(self._results, rival, call)] * 2, self._expected)

    def _inferring(self, rival: str) -> Rival:
        call = functools.partial(self._callable(rival), self._x)
        return Rival(call, [functools.partial(self._results, rival, call)] * 2, self._inferred)

    def _changing(self, rival: str) -> Rival:
        call = functools.partial(self._callable(rival), self._x)
        torch = self._torch.torch

        def attempt() -> list[Any]:
            """Twice the weight, and back: what was prepared from the first must not be used for the second."""
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

    def _differentiating(self, rival: str) -> Rival:
        called, parameters = self._callable(rival), list(self._parameters.values())

        def forget() -> None:
            for parameter in parameters:
                parameter.grad = None

        def call() -> None:
            forget()
            called(self._x).sum().backward()

        def attempt() -> list[Any]:
            forget()
            self._torch.poison(self._bytes)
            (called(self._x) * self._cotangent).sum().backward()
            return [self._parameters[name].grad.double() for name in self._gradients]

        return Rival(call, [attempt], list(self._gradients.values()))

    def _bound(self, training: bool) -> Rival:
        """cupyfuse's own function on the same memory, with its weights bound."""
        lab, head = self._lab, cupyfuse.heads.find(self._name)
        self._reset()
        tensors = {**self._parameters, **dict(self._module.named_buffers())}
        linear = "gemm" if self._initial else "linear"
        called = {"weight": f"{linear}.weight", "bias": f"{linear}.bias", "gamma": "bn.weight", "beta": "bn.bias"}
        called |= {"running_mean": "bn.running_mean", "running_var": "bn.running_var", "scale": "scale"}
        arguments = {
            name: self._torch.array(self._x if name == "x" else tensors[called[name]], lab.cupy)
            for name in cupyfuse.heads.input_shapes(head)
        }
        product = lab.as_double(arguments["x"]) @ lab.as_double(arguments["weight"]).T
        batch_norm = training and bool(self._initial)
        return heads.Head(lab, head, batch_norm, arguments, product).factories(False)[BOUND]()

    # Memory
    def _facts(self, group: str) -> dict[str, float]:
        """What a call of our module and of the plain one takes of the GPU's memory; nothing without a GPU."""
        facts = {}
        for rival, module in ((FUSED, self._fused), (EAGER, self._module)):
            for parameter in self._parameters.values():
                parameter.grad = None
            taken = self._torch.memory(functools.partial(module, self._x), group == BACKWARD)
            facts |= {f"{what}, {rival}": value for what, value in taken.items()}
        return facts


class Launch:
    """A chain of one launch: `torch.nn.Softmax` on a small matrix.

    Parameters
    ----------
    lab : Lab
    dtype : str
    with_grad : bool
        Whether the input wants a gradient.
    """

    def __init__(self, lab: Lab, dtype: str, with_grad: bool):
        self._torch = lab.need_torch()
        torch = self._torch.torch
        self._lab = lab
        self._module = torch.nn.Softmax(dim=1)
        torch.manual_seed(0)
        self._x = torch.randn(SMALL).to(self._torch.place(), getattr(torch, dtype)).requires_grad_(with_grad)
        self._expected = [torch.softmax(self._x.detach().double(), 1)]

    def rivals(self) -> dict[str, Callable[[], Rival]]:
        return {
            # So small a matrix gains nothing: what is measured is what a call costs the host.
            FUSED: lambda: self._rival(fused(self._module, only_gains=False), True),
            EAGER: lambda: self._rival(self._module),
            COMPILED: lambda: self._rival(self._lab.need_compiler().compiled(self._module)),
        }

    def _rival(self, called: Callable[..., Any], ours: bool = False) -> Rival:
        call = functools.partial(called, self._x)

        def attempt() -> list[Any]:
            found = [call().detach().double()]
            if ours:
                whole(called)
            return found

        return Rival(call, [attempt], self._expected)


def cases(lab: Lab, options: Options, names: Sequence[str] = NAMES) -> Iterator[Case]:
    """Run the heads, then the chain of one launch."""
    torch = lab.need_torch().torch
    for name in names:
        lab.release()
        yield from Head(lab, name, options).cases()
    for name in (NO_GRAD, WITH_GRAD):
        lab.release()
        case = Case(LAUNCH, f"softmax, {name}", SMALL, options.dtype)
        makers = Launch(lab, options.dtype, name == WITH_GRAD).rivals()
        with torch.set_grad_enabled(name == WITH_GRAD):
            run(lab, case, makers, FIGURES[LAUNCH], options.budget)
        yield case
