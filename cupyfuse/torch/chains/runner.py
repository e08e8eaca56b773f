"""Run a chain for inputs of any signature: find the executor for it, or leave the chain to PyTorch."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import TraceError, first_line
from ...plan.plan import Plan
from .chain import Chain
from .eligibility import is_intercepted, is_recording, is_sharded, signature_of, unsupported
from .executor import Executor
from .matching import Matches, matcher
from .options import Options, matmul_precision
from .prepacked import Budget
from .tensors import Tensors

if TYPE_CHECKING:
    from ..sharded.executor import ShardedExecutor

_MAX_EXECUTORS = 256
_MOST_RECOGNIZED = 4  # kinds of inputs, by one runner
_ATTEMPTS = 3  # to make an executor where the engine fails, for want of memory, say


class Activity:
    """What the calls of a module run: threads may lose counts to each other, but never the last change of `calls`.

    Attributes
    ----------
    calls : int
        How many calls of chains have begun, of all runners.
    graphs : int
        How many captured graphs with chains the module's call has run.
    saved : float
        Seconds that their chains save by estimate, less what Dynamo takes to enter graphs that are parts of a call.
    """

    __slots__ = ("calls", "graphs", "saved")

    def __init__(self) -> None:
        self.calls = 0
        self.begin()

    def begin(self) -> None:
        """Begin to count for a call of the module."""
        self.graphs, self.saved = 0, 0.0

    @property
    def pays(self) -> bool:
        """Whether the call's chains save more than its graphs cost; of a call that is one graph, they do."""
        return self.graphs <= 1 or self.saved > 0.0


class Runner:
    """A chain with an executor for each signature of its inputs; called with inputs, it returns the outputs.

    Inputs that cannot be fused (subclasses of tensors, other devices, shapes that an operation refuses), and those for
    which the engine fails to plan or to load, run eagerly; `refusals` counts the reasons.

    Attributes
    ----------
    saved : float
        Seconds that a call saves by estimate; of the first chain of a graph, less what it takes to enter the graph.
    is_first : bool
        Whether the chain is the first one of its graph.
    """

    def __init__(
        self,
        chain: Chain,
        options: Options | None = None,
        budget: Budget | None = None,
        activity: Activity | None = None,
    ):
        self.chain = chain
        self.options = options or Options()
        self.budget = budget or Budget()
        self.activity = activity or Activity()
        self.saved, self.is_first = 0.0, False
        self.refusals: dict[str, int] = {}
        self._fixed = sorted(chain.fixed)
        self._varying = [k for k in range(len(chain.names)) if k not in chain.fixed]
        # By the signature of the varying inputs alone, which is all that a call with unchanged weights has to hash.
        self._latest: dict[Hashable, Executor] = {}
        # What recognises inputs without a key, with their executor, the last one first.
        self._recognized: list[tuple[Matches, Executor]] = []
        # By the signature of all inputs; text says why they are left to PyTorch.
        self._executors: dict[Hashable, Executor | str] = {}
        self._failures: Counter[Hashable] = Counter()  # of the engine, by the signature of all inputs
        self._sharded: dict[Hashable, ShardedExecutor | str] = {}
        self._lock = threading.RLock()
        self._by_sizes: dict[tuple[int, ...], Runner] = {}

    def __call__(self, tensors: Tensors) -> Sequence[Any]:
        if not is_intercepted():
            for matches, found in self._recognized:
                if matches(tensors) and (
                    not found.prepacks or found.is_current(tensors) or found.bind_changed(tensors)
                ):
                    return found(tensors)
        executor = self._executor_for(tensors)
        if not isinstance(executor, str):
            return executor(tensors)
        self.refusals[executor] = self.refusals.get(executor, 0) + 1
        return run_eagerly(self.chain, tensors)

    def as_function(self) -> Callable[..., Any]:
        """Return a function of the chain's inputs and sizes for a graph to call; a single output is returned bare."""
        count, single, activity = len(self.chain.names), len(self.chain.outputs) == 1, self.activity

        def chain(*arguments: Any) -> Any:
            activity.calls += 1
            activity.graphs += self.is_first
            activity.saved += self.saved
            runner = self if not self.chain.sizes else self._with_sizes(arguments[count:])
            outputs = runner(arguments[:count])
            return outputs[0] if single else outputs

        chain.__module__, chain.__qualname__ = __name__, "chain"
        return chain

    def _with_sizes(self, sizes: tuple[int, ...]) -> Runner:
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = runner = Runner(self.chain.with_sizes(sizes), self.options, self.budget)
            runner.refusals = self.refusals
        return self._by_sizes[sizes]

    @property
    def executors(self) -> list[Executor]:
        """Every executor so far, for all values of the symbolic sizes."""
        own = [e for e in list(self._executors.values()) if isinstance(e, Executor)]
        return [*own, *(e for runner in list(self._by_sizes.values()) for e in runner.executors)]

    @property
    def plans(self) -> list[Plan]:
        """The plan of every executor, and of every round on shards."""
        found = [e.plan for e in self.executors]
        for runner in (self, *list(self._by_sizes.values())):
            found += [p for e in list(runner._sharded.values()) if not isinstance(e, str) for p in e.plans]
        return found

    def refresh(self) -> None:
        """Have all weights prepacked again at the next call."""
        for executor in self.executors:
            executor.refresh()

    def release(self) -> None:
        """Release prepacked weights until the next call."""
        for executor in self.executors:
            executor.release()

    def _executor_for(self, tensors: Tensors) -> Executor | ShardedExecutor | str:
        """Return the executor for these inputs, or why they are left to PyTorch."""
        if is_intercepted():
            return "a transform or a mode of PyTorch's is active"
        signature = signature_of(self.chain, tensors, self._varying)
        if isinstance(signature, str):
            return self._find_sharded(tensors, signature)
        grad = is_recording()
        key = (grad, self.options.current_precision(), torch.get_default_dtype(), signature)
        executor = self._latest.get(key)
        if executor is not None and (executor.is_current(tensors) or executor.bind_changed(tensors)):
            self._recognize(executor, tensors)
            return executor
        return self._find_or_compile(key, tensors, grad)

    def _recognize(self, executor: Executor, tensors: Tensors) -> None:
        """Recognise further inputs like those of a call that an executor has had before."""
        others = [each for each in self._recognized if each[1] is not executor or not each[0](tensors)]
        reads_precision = executor.has_products and self.options.precision is None
        precision = matmul_precision if reads_precision else None
        if executor.prepacks:
            matches = matcher(tensors, self._varying, precision)
        else:
            matches = matcher(tensors, range(len(tensors)), precision, self.chain.fixed)
        self._recognized = [(matches, executor), *others][:_MOST_RECOGNIZED]

    def _find_or_compile(self, key: Hashable, tensors: Tensors, grad: bool) -> Executor | ShardedExecutor | str:
        """Find the executor for all inputs, compile it if there is none, and bind the fixed inputs to it."""
        signature = signature_of(self.chain, tensors, self._fixed)
        if isinstance(signature, str):
            return self._find_sharded(tensors, signature)
        full_key = (key, signature, tuple(tensors[k].is_inference() for k in self._fixed))
        with self._lock:
            executor = self._executors.get(full_key)
            if executor is None:
                try:
                    executor = self._compile(tensors, grad)
                except Exception as error:  # of any library beneath: memory, a compiler or a driver is missing
                    executor = f"{type(error).__name__}: {first_line(error)}"
                    message = f"cupyfuse left {self.chain.name} to PyTorch: {executor}"
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                    # Kernels cannot be loaded while a CUDA graph is captured: such a failure does not count.
                    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
                    self._failures[full_key] += not capturing
                    if self._failures[full_key] < _ATTEMPTS:
                        return executor
                if len(self._executors) >= _MAX_EXECUTORS:
                    self._executors.clear()
                    self._failures.clear()
                    self._latest.clear()
                    self._recognized = []
                self._executors[full_key] = executor
            if isinstance(executor, Executor):
                executor.bind(tensors)
                self._latest[key] = executor
                if not executor.prepacks:
                    # Weights of another type than its first ones (tensors, parameters) would come here in every call.
                    self._recognize(executor, tensors)
        return executor

    def _find_sharded(self, tensors: Tensors, reason: str) -> ShardedExecutor | str:
        """Find the executor for DTensors; `reason` says why other inputs are left to PyTorch."""
        if not any(is_sharded(t) for t in tensors):
            return reason
        from ..sharded.executor import ShardedExecutor, signature_of  # DTensor's import takes a while

        grad = is_recording()
        key = (grad, self.options.current_precision(), torch.get_default_dtype(), signature_of(tensors))
        with self._lock:
            found = self._sharded.get(key)
            if found is None:
                needs = tuple(grad and t.requires_grad for t in tensors)
                try:
                    found = ShardedExecutor(self.chain, self.options, tensors, needs)
                except (TraceError, ValueError, TypeError) as error:
                    found = first_line(error)
                if len(self._sharded) >= _MAX_EXECUTORS:
                    self._sharded.clear()
                self._sharded[key] = found
        return found

    def _compile(self, tensors: Tensors, grad: bool) -> Executor | str:
        """Make an executor, or say why these inputs are left to PyTorch."""
        reason = unsupported(self.chain, tensors)
        if reason:
            return reason
        needs = tuple(grad and t.requires_grad for t in tensors)
        try:
            return Executor(self.chain, self.options, tensors, needs, self.budget)
        except (TraceError, ValueError, TypeError) as error:
            return first_line(error)


def run_eagerly(chain: Chain, tensors: Tensors) -> list[Any]:
    """Run a chain with PyTorch's own operations, updates included."""
    results = chain.eager(tensors)
    outputs, updates = results[: len(chain.outputs)], results[len(chain.outputs) :]
    with torch.no_grad():
        for (k, _), value in zip(chain.updates, updates, strict=True):
            tensors[k].copy_(value)
    return outputs
