"""Calls of NumPy's or CuPy's own functions on whole arrays: what the nodes of operator `library` run.

Beside the functions of the array library there are SciPy's (CuPy's of the same names lie in `cupyx.scipy`), indexing,
and functions that write to their first operand, or to a copy of it, and return what they wrote to.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, getitem, itemgetter, setitem
from typing import Any

import numpy as np

from ..dtypes import is_complex
from ..errors import EngineError
from .numbers import Number, Numbers


@dataclass(frozen=True)
class Operand:
    """A placeholder in the arguments of a call for the node's input number `index`."""

    index: int


@dataclass(frozen=True)
class Elements:
    """A placeholder for the elements of an array that a mask of its leading axes selects, which lie along `axis`."""

    array: Any
    mask: Any
    axis: int = 0

    def selected(self, array: Any, mask: Any) -> Any:
        """Return the elements of an array."""
        found = array[mask]
        return found.transpose((*range(1, self.axis + 1), 0, *range(self.axis + 1, found.ndim)))


@dataclass(frozen=True)
class NamedFunction:
    """A function among the arguments of a call, by its name as in "scipy.stats.norm.cdf"."""

    name: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return pkgutil.resolve_name(self.name)(*arguments, **options)


def of_linear_algebra(function: str) -> bool:
    """Whether a function, by its name in a `LibraryCall`, may solve or decompose matrices."""
    return function.startswith(("linalg.", "scipy.linalg.", "scipy.stats.multivariate_"))


@dataclass(frozen=True)
class LibraryCall:
    """One call of a library's function; the graph has a node for each of its results.

    Equal calls do the same: their arguments compare by `repr`, which tells -0.0 from 0.0.

    Attributes
    ----------
    function : str
        The public name beneath the library's namespace, as in "sort" or "linalg.svd"; one of SciPy's, as in
        "scipy.special.gammaln"; "getitem" or "setitem"; "writing.put" and the like for a function that writes to its
        first operand, and "writing.add.at" for such a method of a ufunc.
    arguments, options : tuple, dict
        Positional and keyword arguments, nested, with an `Operand` for each array, or `Elements` of one, and a
        `Number` for each that the call of a plan brings.
    shapes, results : tuple of tuple of int
        The shapes of the operands, and of the results.
    dtypes : tuple of str
        The dtypes of the results.
    key : str
        The arguments as text, for comparison.
    """

    function: str
    arguments: tuple[Any, ...] = field(compare=False)
    options: dict[str, Any] = field(compare=False)
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    key: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.arguments!r} {sorted(self.options.items())!r}")

    def __repr__(self) -> str:
        return display_name(self.function)

    @property
    def numbers(self) -> tuple[Number, ...]:
        """The numbers among the arguments, which follow the operands when the function is called."""
        return tuple(dict.fromkeys(_numbers_in((self.arguments, self.options))))

    def for_values(self, values: Numbers) -> LibraryCall:
        """Return what the call is for the numbers that a plan is called with."""
        arguments, options = replace_numbers((self.arguments, self.options), lambda n: n.evaluate(values))
        return replace(self, arguments=arguments, options=options)

    @property
    def writes(self) -> bool:
        """Whether the function writes to its first operand."""
        return self.function == _SETITEM or self.function.startswith(_WRITING)

    @property
    def indexes(self) -> bool:
        """Whether the function reads or writes its first operand at indices alone, which its second argument holds."""
        of_elements = any(isinstance(a, Elements) for a in self.arguments)
        return public_name(self.function).rpartition(".")[2] in _INDEXED and not of_elements

    def resolve_in(self, namespace: Any, in_place: bool = False) -> Callable[..., Any]:
        """Return the function of a library, given as its module; see `resolve_function`."""
        return resolve_function(self.function, namespace, in_place)

    def prepare(
        self,
        function: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        needed: Iterable[int] | None = None,
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """Return a call of `function` that takes the operands, in their shapes, and numbers; it returns all results.

        `given` are the arguments and options, if they are not the call's own. `needed` are the results that are read,
        all by default: the shapes of others may depend on values, as those of residuals do on the rank of a matrix.
        """
        numbers, count = self.numbers, len(self.shapes)
        arguments, options = given or (self.arguments, self.options)
        if numbers:
            places = {n: Operand(count + k) for k, n in enumerate(numbers)}
            arguments, options = replace_numbers((arguments, options), places.__getitem__)
        call = _filled_call(function, arguments, options)
        planned = list(zip(self.results, map(is_complex, self.dtypes), strict=True))
        checked = list(range(len(planned)) if needed is None else needed)

        def is_as_planned(result: Any, shape: tuple[int, ...], may_be_complex: bool) -> bool:
            return getattr(result, "shape", ()) == shape and (may_be_complex or not _is_complex(result))

        def run(operands: Sequence[Any]) -> list[Any]:
            found = flatten(call(operands))
            if len(found) != len(planned):
                raise self._mismatch(found)
            if not all(is_as_planned(found[k], *planned[k]) for k in checked):
                raise self._mismatch(found)
            return found

        if len(planned) != 1:
            return run
        ((shape, may_be_complex),) = planned

        def run_for_one(operands: Sequence[Any]) -> list[Any]:
            result = call(operands)
            try:
                if result.shape == shape and (may_be_complex or result.dtype.kind != "c"):
                    return [result]
            except AttributeError:  # a number, or a list
                pass
            found = flatten(result)
            if len(found) != 1 or not is_as_planned(found[0], *planned[0]):
                raise self._mismatch(found)
            return found

        return run_for_one

    def _mismatch(self, found: Sequence[Any]) -> EngineError:
        """Return the error for results of other shapes than were planned, or complex ones in the place of real ones."""
        shapes = tuple(tuple(getattr(r, "shape", ())) for r in found)
        if shapes != self.results:
            planned = f"results of shapes {self.results} were planned"
            return EngineError(
                f"{self!r}: {planned}, for these values it returned {shapes}; give it room for all values, as "
                "np.bincount by a minlength above all labels, or call it outside of the fused function"
            )
        name, r = next((d, r) for d, r in zip(self.dtypes, found, strict=True) if _is_complex(r) and not is_complex(d))
        return EngineError(
            f"{self!r}: {name} results were planned, and for these operands it returned {r.dtype} ones; "
            "convert the operands with .astype(complex) first"
        )


def flatten(results: Any) -> list[Any]:
    """Return the results of a function in a list, from nested tuples and lists or a single one."""
    if isinstance(results, (tuple, list)):
        return [r for item in results for r in flatten(item)]
    return [results]


def _is_complex(result: Any) -> bool:
    """Whether what a library returned is a complex array or number."""
    return getattr(getattr(result, "dtype", None), "kind", "") == "c"


_WRITING, _SETITEM = "writing.", "setitem"
SET_PART = {"real": "writing.real", "imag": "writing.imag"}  # of complex arrays, by the names of the attributes
VIEW = "view"  # an array, and another dtype of its size
PYTHON_INTEGER = "int"  # a number, and the dtype of arrays beside it, which NumPy checks that it fits into
ORDER_STATISTICS = ("median", "quantile", "percentile")  # which may be rewritten, for quantiles that are known
OF_PYTHON = ("operator.", "math.")  # with a name: the dtype of the result, and operands that are Python's numbers
_INDEXED = ("getitem", _SETITEM, "take", "put", "take_along_axis", "put_along_axis", "at")


def writing_call(name: str) -> str:
    """Return how a `LibraryCall` names a function that writes to its first operand, such as "put" or "add.at"."""
    return _WRITING + name


def public_name(function: str) -> str:
    """Return a function's name beneath the library's namespace, without what a `LibraryCall` says beside it."""
    return function.removeprefix(_WRITING)


def display_name(function: str) -> str:
    """Return a function's name as in a user's code, for messages and reports."""
    named = {
        "getitem": "x[index]",
        "setitem": "x[index] = y",
        VIEW: "x.view",
        PYTHON_INTEGER: "a Python integer beside narrow ones",
    }
    if function in named:
        return named[function]
    if function in SET_PART.values():
        return f"x.{public_name(function)} = y"
    if function.startswith(OF_PYTHON):
        return f"{function} of Python's numbers"
    return function if function.startswith("scipy.") else f"np.{public_name(function)}"


def resolve_function(name: str, namespace: Any, in_place: bool = False) -> Callable[..., Any]:
    """Return a library's function by its name in a `LibraryCall`; AttributeError if there is none.

    A function that writes to its first operand returns that operand: a copy of it, or with `in_place` itself.
    """
    if name == "getitem":
        return getitem
    if name == VIEW:
        return lambda array, dtype: array.view(dtype)
    if name == PYTHON_INTEGER:
        return lambda number, dtype: namespace.asarray(np.array(int(number), dtype))
    if name.startswith(OF_PYTHON):
        return partial(_of_python_numbers, pkgutil.resolve_name(name), namespace)
    if name == _SETITEM or name.startswith(_WRITING):
        write = _writing(name, namespace)
        changed = partial(_changed_by, write)
        return changed if in_place else on_copy(changed)
    if not name.startswith("scipy."):
        return attrgetter(name)(namespace)
    prefix = "cupyx." if namespace.__name__ == "cupy" else ""
    try:
        return pkgutil.resolve_name(prefix + name)
    except ImportError as error:
        raise AttributeError(str(error)) from error


def _writing(name: str, namespace: Any) -> Callable[..., Any]:
    """Return a function that writes to its first operand."""
    if name == _SETITEM:
        return setitem
    if name in SET_PART.values():
        return lambda array, part: setattr(array, public_name(name), part)
    found: Callable[..., Any] = attrgetter(public_name(name))(namespace)
    return found


def _of_python_numbers(function: Callable[..., Any], namespace: Any, dtype: str, *numbers: Any, **options: Any) -> Any:
    """Return an operator's result for numbers of Python's as an array; it raises what Python raises."""
    result = function(*[n if isinstance(n, (int, float)) else n.item() for n in numbers], **options)
    if np.result_type(type(result)) != dtype:
        raise TypeError(
            f"{function.__name__} of Python's numbers gives a {type(result).__name__} for these values, where a plan "
            f"has {dtype}; return the numbers, and compute it outside of the fused function"
        )
    return namespace.asarray(np.array(result, dtype))


def _changed_by(write: Callable[..., Any], array: Any, *arguments: Any, **options: Any) -> Any:
    """Return an array after a function has written to it."""
    write(array, *arguments, **options)
    return array


def on_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same on a copy of its first argument."""
    return lambda array, *arguments, **options: function(array.copy(), *arguments, **options)


def _filled_call(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Callable[[Sequence[Any]], Any]:
    """Return a call of a function with the operands in the places of their placeholders."""
    if not has_operands(options):
        function = partial(function, **options) if options else function
        if all(isinstance(a, Operand) and a.index == k for k, a in enumerate(arguments)):
            if len(arguments) == 1:
                return lambda operands: function(operands[0])
            count = len(arguments)
            return lambda operands: function(*operands[:count])
        fill_arguments = filler(arguments)
        return lambda operands: function(*fill_arguments(operands))
    fill = filler((arguments, options))

    def call(operands: Sequence[Any]) -> Any:
        positional, by_name = fill(operands)
        return function(*positional, **by_name)

    return call


def filler(value: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that replaces each placeholder in nested tuples, lists and dicts by its array."""
    if isinstance(value, Operand):
        return itemgetter(value.index)
    if isinstance(value, Elements):
        array_and_mask = filler((value.array, value.mask))
        return lambda operands: value.selected(*array_and_mask(operands))
    if not has_operands(value):
        return lambda operands: value
    if isinstance(value, tuple) and all(isinstance(v, Operand) and v.index == k for k, v in enumerate(value)):
        return lambda operands: operands[: len(value)]
    if isinstance(value, dict):
        fill_values = filler(list(value.values()))
        return lambda operands: dict(zip(value, fill_values(operands), strict=True))
    cls = type(value)
    filled = [(k, filler(v)) for k, v in enumerate(value) if has_operands(v)]

    def fill(operands: Sequence[Any]) -> Any:
        items = list(value)
        for k, fill_item in filled:
            items[k] = fill_item(operands)
        return items if cls is list else cls(items)

    return fill


def _numbers_in(value: Any) -> Iterator[Number]:
    """Yield the numbers in nested tuples, lists and dicts."""
    if isinstance(value, Number):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(item)


def replace_numbers(value: Any, replacement: Callable[[Number], Any]) -> Any:
    """Return nested tuples, lists and dicts with what a function returns for each number in them."""
    if isinstance(value, Number):
        return replacement(value)
    if isinstance(value, dict):
        return {k: replace_numbers(v, replacement) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(replace_numbers(v, replacement) for v in value)
    return value


def has_operands(value: Any) -> bool:
    """Whether nested tuples, lists and dicts hold a placeholder."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(has_operands, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (Operand, Elements))
