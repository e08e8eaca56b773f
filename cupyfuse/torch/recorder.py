"""Recording: run a module's forward once on fake tensors, and write down the operations it asks PyTorch for.

Fake tensors have shapes and dtypes and no data, so nothing is computed and no memory is taken; a forward that needs a
tensor's values cannot be recorded, and says so. What a record depends on beside shapes and dtypes is left to `guards`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .chain import Ref
from .effects import Outside, Snapshot
from .guards import PLAIN, hooked, watched
from .interception import modules_through, unpatched
from .reach import asks_for_types
from .record import Meta, Operation, Record, Refused, Source, Submodule, draws, sources_of, storage_of
from .watching import ASKED, BEYOND, Noting, reason, state, statistics

BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm.forward
MATRICES_ONLY = torch.nn.BatchNorm1d._check_input_dim


def record(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: set[str],
) -> Record:
    """Record a module's forward on arguments of these shapes and dtypes.

    Within `torch.inference_mode` it is recorded as without gradients: fake tensors then still tell what is changed in
    place.

    Parameters
    ----------
    module, forward
        The module, and the function that is its forward, called with the arguments alone.
    args, kwargs
        Its arguments.
    leaves : set of str
        Paths of submodules that are recorded as one call each.

    Raises
    ------
    Refused
        It cannot be recorded.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return _Recorder(module, leaves).run(forward, args, kwargs)
    return _Recorder(module, leaves).run(forward, args, kwargs)


class _Recorder(TorchFunctionMode):
    def __init__(self, module: torch.nn.Module, leaves: set[str]):
        super().__init__()
        self.module, self.leaves = module, leaves
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.record = Record(autocast=torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
        self.numbers: dict[int, int] = {}  # id of a tensor, real or fake -> its number
        self.fakes: dict[int, FakeTensor] = {}  # id of a real tensor -> its fake
        self.twins: dict[int, torch.Tensor] = {}  # of the module's own tensors that are arguments too
        self.held: list[Any] = []
        self.noting = Noting()
        self.made: list[weakref.ref[Any]] = []  # what operations have returned
        self.paths = {id(m): path for path, m in module.named_modules(remove_duplicate=False)}
        self.stack = [""]
        self.known = sources_of(module)
        self.state = state()

    # Values
    def number(self, tensor: Any) -> int:
        """The number of a tensor as user code holds it."""
        if id(tensor) in self.numbers:
            return self.numbers[id(tensor)]
        if isinstance(tensor, FakeTensor):
            raise Refused(self.stack[-1], "a tensor comes from where it could not be followed")
        source = self.known.get(id(tensor))
        number = self.add(self.imitate(tensor), tensor)
        self.record.sources[number] = source if source is not None else tensor
        return number

    def add(self, fake: Any, *others: Any) -> int:
        number = len(self.record.tensors)
        self.record.tensors.append(fake)
        for tensor in (fake, *others):
            self.numbers[id(tensor)] = number
            self.held.append(tensor)
        return number

    def imitate(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self.fakes:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise Refused(self.stack[-1], f"a tensor of type {type(tensor).__name__}")
            with torch._C.DisableTorchFunction():
                fake = self.fakes[id(tensor)] = self.fake.from_tensor(tensor, static_shapes=True)
            for key, value in tensor.__dict__.items():  # what its user has written on it
                fake.__dict__.setdefault(key, value)
            self.held.append(tensor)
        return self.fakes[id(tensor)]

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like one of the module's, in the same memory."""
        if id(tensor) not in self.twins:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                same = tensor.detach().requires_grad_(tensor.requires_grad)
                parameter = isinstance(tensor, torch.nn.Parameter)
                self.twins[id(tensor)] = torch.nn.Parameter(same, tensor.requires_grad) if parameter else same
        return self.twins[id(tensor)]

    def faked(self, tree: Any) -> Any:
        """The arguments with every real tensor exchanged for its fake."""

        def leaf(value: Any) -> Any:
            if isinstance(value, FakeTensor):
                return value
            if isinstance(value, torch.Tensor):
                return self.record.tensors[self.number(value)]
            return value

        return pytree.tree_map(leaf, tree)

    def referred(self, tree: Any) -> Any:
        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return Ref(self.number(value))
            if isinstance(value, slice) and any(isinstance(v, torch.Tensor) for v in _parts(value)):
                raise Refused(self.stack[-1], "a slice by tensors")
            return value

        return pytree.tree_map(leaf, tree)

    # Running
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
        flat, spec = pytree.tree_flatten((args, kwargs))
        outside = Outside((args, kwargs))
        gpus = {t.get_device() for t in flat if isinstance(t, torch.Tensor) and t.is_cuda}
        self.record.inlined[""] = self.module
        self._look_through("", self.module)
        # Whoever packs what autograd saves, such as checkpointing, is not to see fake tensors; nor are fake random
        # numbers to be missing from the real ones.
        with (
            modules_through(self),
            torch.random.fork_rng(gpus, enabled=not _capturing(gpus)),
            self.fake,
            self.noting,
            saved_tensors_hooks(_nothing, _nothing_saved),
        ):
            entered = []
            for value in flat:
                if isinstance(value, torch.Tensor):
                    # Another call may be given another tensor than one of the module's own: it is one of its own here.
                    fake = self.imitate(self.apart(value) if id(value) in self.known else value)
                    number = self.numbers.get(id(fake))
                    if number is None:
                        number = self.add(fake)
                    self.record.arguments.append(number)
                    entered.append(fake)
                else:
                    entered.append(value)
            fake_args, fake_kwargs = pytree.tree_unflatten(entered, spec)
            before, grad_mode = Snapshot(self.module), torch.is_grad_enabled()
            try:
                with self:
                    result = forward(*fake_args, **fake_kwargs)
            except Refused:
                raise
            except Exception as error:
                raise Refused(self.stack[-1], reason(error)) from error
            finally:
                torch.set_grad_enabled(grad_mode)
                changed, effect = before.restore(), outside.restore((fake_args, fake_kwargs))
            if changed is not None:
                path, attribute = changed
                raise Refused(path, f"its forward changes the attribute {attribute!r}")
            if effect:
                raise Refused("", effect)
            self.record.result = self.referred(result)
            del result, fake_args, fake_kwargs, entered
            self._unfix()
            self._let_go()
        for leaf in pytree.tree_leaves(self.record.result):
            if not isinstance(leaf, (Ref, *PLAIN)):
                raise Refused("", f"it returns a {type(leaf).__name__}, which may hold tensors")
        return self.record

    def _unfix(self) -> None:
        """What PyTorch's own code updates may get no new version: nothing is to be prepared from it."""
        for operation in self.record.operations:
            for number in operation.written if not operation.rule else ():
                source = self.record.sources.get(number)
                if isinstance(source, Source):
                    self.record.sources[number] = replace(source, fixed=False)

    def _let_go(self) -> None:
        """Keep what is known of the tensors, not the tensors; one that is still alive was put somewhere."""
        self.record.tensors = [
            Meta(tuple(t.shape), t.dtype, t.device, t.requires_grad, storage_of(t), t.stride())
            for t in self.record.tensors
        ]
        self.held.clear()
        self.fakes.clear()
        self.numbers.clear()
        if any(made() is not None for made in self.made):
            gc.collect()
        if any(made() is not None for made in self.made):
            raise Refused("", "a tensor is kept somewhere outside of it")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in BEYOND:
            raise Refused(self.stack[-1], BEYOND[name])
        if func in ASKED:
            raise Refused(self.stack[-1], ASKED[func])
        args, kwargs = self.faked((args, kwargs))
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        versions = [t._version for t in operands]
        shapes = [(t.shape, t.stride()) for t in operands]
        storages = {t.untyped_storage()._cdata for t in operands}
        self.noting.drawn = False
        result = func(*args, **kwargs)
        if shapes != [(t.shape, t.stride()) for t in operands]:
            raise Refused(self.stack[-1], f"{name} changes the shape of a tensor that is there")
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        written = [t for t, version in zip(operands, versions, strict=True) if t._version != version]
        written += [t for t in statistics(func, args, kwargs) if all(t is not w for w in written)]
        fresh = [t for t in tensors if id(t) not in self.numbers]
        if not fresh and not written:
            if operands and name.endswith("_") and not name.endswith("__") and not draws(name):
                raise Refused(self.stack[-1], f"{name} changes what is known of a tensor")
            return result  # a shape, a dtype, an operand as it was: the code knows it from now on
        if state() != self.state:
            raise Refused(self.stack[-1], "grad mode or autocast changes within it")
        args, kwargs = self.referred((args, kwargs))
        operation = Operation(func, args, kwargs, None, self.stack[-1])
        operation.view = any(t.untyped_storage()._cdata in storages for t in tensors)
        operation.written = frozenset(self.number(t) for t in written)
        operation.ordered = not operands or bool(written) or self.noting.drawn or draws(name)
        for tensor in fresh:
            self.add(tensor)
            self.made.append(weakref.ref(tensor))
        operation.result = self.referred(result)
        self.record.operations.append(operation)
        return result

    # Modules
    def call_module(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        path = self.paths.get(id(module))
        if path is None:
            raise Refused(self.stack[-1], f"a {type(module).__name__} is called that is none of its submodules")
        forward = module.__dict__.get("forward") or getattr(module, "_cupyfuse_forward", None) or module.forward
        if watched(module) if path in self.leaves else any((module._forward_hooks, module._forward_pre_hooks)):
            raise Refused(self.stack[-1], f"hooks of its submodule {path!r} may change what it works on")
        if path in self.leaves or hooked(module):
            return self._leaf(path, module, forward, args, kwargs)
        kind = type(module)
        normalises = kind.forward is BATCH_NORM and getattr(kind, "_check_input_dim", None) is MATRICES_ONLY
        if normalises and module.training and module.track_running_stats and _is_matrix(args, kwargs):
            return self._batch_norm(path, module, args[0])
        self._look_through(path, module)
        self.record.inlined[path] = module
        self.stack.append(path)
        try:
            result = forward(*args, **kwargs)
        except Refused:
            raise
        except Exception as error:
            raise Refused(path, reason(error)) from error
        self.stack.pop()
        return result

    def _look_through(self, path: str, module: Any) -> None:
        if asks_for_types(module):
            raise Refused(path, "its code asks for the type of a value, and fake tensors have another")

    def _leaf(self, path: str, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Only the shapes of its results are looked for; what it does is its own."""
        inner = _Silent(self)
        positional, named = self.referred((args, kwargs))
        before = Snapshot(module)
        for real in _tensors_of(module):
            inner.know(real)
        with torch._C.DisableTorchFunction():
            versions = {number: t._version for number, t in enumerate(self.record.tensors)}
        try:
            with unpatched(), inner:
                result = forward(*self.faked(args), **self.faked(kwargs))
        except Exception as error:
            raise Refused(
                self.stack[-1], f"its submodule {path!r} cannot be looked through: {reason(error)}"
            ) from error
        finally:
            with torch._C.DisableTorchFunction():
                before.restore()
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.numbers:
                self.add(tensor)
        operation = Operation(Submodule(path), positional, named, self.referred(result), self.stack[-1], ordered=True)
        tensors = self.record.tensors
        with torch._C.DisableTorchFunction():
            written = {number for number, version in versions.items() if tensors[number]._version != version}
        operation.written = frozenset(written | {self.numbers[k] for k in inner.updated if k in self.numbers})
        self.record.operations.append(operation)
        return result

    def _batch_norm(self, path: str, module: Any, x: Any) -> Any:
        """BatchNorm in training as one operation: its counter of batches, and the average by it, are part of it."""
        self.record.inlined[path] = module
        operands = [module.running_mean, module.running_var, module.weight, module.bias, module.num_batches_tracked]
        mean, var, weight, bias, count = (None if t is None else Ref(self.number(t)) for t in operands)
        arguments = (Ref(self.number(x)), mean, var, weight, bias, count, True, module.momentum, module.eps)
        if x.shape[0] < 2:
            raise Refused(self.stack[-1], "a training batch of fewer than 2 rows")
        with torch._C.DisableTorchFunction():
            result = torch.empty_like(x)
        self.add(result)
        updated = frozenset(r.number for r in (mean, var, count) if r is not None)
        operation = Operation(Submodule(path), (Ref(self.number(x)),), {}, Ref(self.number(result)), path)
        operation.rule, operation.arguments, operation.written = "batch_norm_module", arguments, updated
        self.record.operations.append(operation)
        return result


class _Silent(TorchFunctionMode):
    """Exchanges real tensors for fake ones and records nothing."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder
        self.updated: set[int] = set()  # running statistics, by the identity of their fakes

    def know(self, tensor: torch.Tensor) -> None:
        """Give a tensor that may be changed a number, so that who reads it later is known to."""
        if type(tensor) in (torch.Tensor, torch.nn.Buffer):
            self.recorder.number(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def leaf(value: Any) -> Any:
            real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
            return self.recorder.imitate(value) if real else value

        args, kwargs = pytree.tree_map(leaf, (args, kwargs or {}))
        self.updated.update(map(id, statistics(func, args, kwargs)))
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)


def _is_matrix(args: Any, kwargs: Any) -> bool:
    return len(args) == 1 and not kwargs and args[0].dim() == 2


def _tensors_of(module: torch.nn.Module) -> list[Any]:
    """What a module may change beside its arguments."""
    return [b for b in module.buffers() if not isinstance(b, FakeTensor)]


def _capturing(gpus: Iterable[int]) -> bool:
    return bool(gpus) and torch.cuda.is_current_stream_capturing()


def _nothing(tensor: Any) -> None:
    """What autograd keeps of a fake tensor; the tensor itself would be kept for ever by what it was made with."""


def _nothing_saved(packed: Any) -> Any:
    raise RuntimeError("gradients are computed within it")


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step
