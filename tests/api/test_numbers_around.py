"""Numbers around functions: constants, until they change; then numbers of a plan, where the function lets them."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from number_programs import assert_same
from support import Engine, assert_close, assert_equal, normal, unit

import cupyfuse as cf
from cupyfuse.api.environment import Environment
from cupyfuse.api.fuse import Fused

X = np.arange(12, dtype=np.float32).reshape(3, 4)
Z = np.arange(12, dtype=np.int8).reshape(3, 4)
RATE: Any = 0.1
COUNT: Any = 1
OTHER: Any = 2.0
HELD: Any = None
THIS = sys.modules[__name__]


@pytest.fixture(autouse=True)
def first_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before each test, and again after it."""
    for name, value in (("RATE", 0.1), ("COUNT", 1), ("OTHER", 2.0), ("HELD", None)):
        monkeypatch.setattr(THIS, name, value)
    yield


def assign(**values: Any) -> None:
    vars(THIS).update(values)


def variable(function: Callable[[Any, Any], Any]) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """Return a function of an array that reads the other argument from its closure, and one that assigns it."""
    k: Any = None

    def reading(x: Any) -> Any:
        return function(x, k)

    def assign_k(value: Any) -> None:
        nonlocal k
        k = value

    return reading, assign_k


def no_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls that generated code does not recognise fail."""
    monkeypatch.setattr(Environment, "add_to", lambda self, signature: pytest.fail("walked"))


def descent(w: Any, g: Any) -> Any:
    return w - RATE * g / (1 - 0.9**COUNT)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_learning_rate_needs_two_plans(engine: Engine, dtype: str, rng: np.random.Generator) -> None:
    """The first one, where it is a constant, and one that serves all others, with the values of constants."""
    w, g = (normal(rng, (3, 40), dtype) for _ in range(2))
    fused, given = cf.fuse(descent), (engine.array(w), engine.array(g))

    def step(k: int) -> Any:
        assign(RATE=0.1 * 0.95**k, COUNT=k + 1)
        return fused(*given)

    engine.prepare(lambda k=k: step(k) for k in range(2))
    for k in (*range(12), 3, 10**6, 0):
        found = step(k)
        if k in (0, 1, 11, 3, 10**6):
            constant = cf.fuse(lambda w, g, rate=RATE, count=COUNT: w - rate * g / (1 - 0.9**count))
            expected = engine.host(constant(*given))
            assert found.dtype == expected.dtype
            if engine.name == "cuda":  # the compiler may place fused multiply-adds in one plan and not in the other
                assert_close(engine.host(found), expected, 8 * unit(dtype) * (abs(np.float64(w)) + abs(np.float64(g))))
            else:
                assert_equal(engine.host(found), expected)
    assert len(fused.plans) == 2


def test_what_never_changes_stays_a_constant() -> None:
    fused = cf.fuse(lambda x: (x * RATE + COUNT).sum(axis=1))
    fused(X)
    signature = fused.signature_of((X,))
    assert not signature.numbers and not signature.captured
    literal = cf.fuse(lambda x: (x * 0.1 + 1).sum(axis=1))
    literal(X)
    steps = [[(s.kind, s.fused, s.reads, s.writes, s.flops) for s in f.plans[0].steps] for f in (fused, literal)]
    assert steps[0] == steps[1]


# Functions of an array and a number, with the number of plans for the values of the test.
OF_FLOATS: list[tuple[Callable[[Any, Any], Any], int]] = [
    (lambda x, k: x * k, 2),
    (lambda x, k: (k - x) / (k + 7.5) + k, 2),
    (lambda x, k: np.where(x > k, x, k) + np.clip(x, -abs(k), 9 + k), 2),
    (lambda x, k: x * 0.9**k, 2),
    (lambda x, k: cf.leaky_relu(x, k) + k * 3, 2),
    (lambda x, k: (x, k, [k / 2, {"k": k * 2}]), 2),
    (lambda x, k: x * k if isinstance(k, float) and not isinstance(k, int) and k is not None else x, 2),
    (lambda x, k: x * 2 if k > 1 else x * k, 3),
    (lambda x, k: x * max(k, 1.0), 3),
    (lambda x, k: x * math.sqrt(k) + math.cos(math.pi * k), 2),
    (lambda x, k: x * math.floor(k) + int(k), 2),
    (lambda x, k: x * np.exp(k) + len(f"{k}"), 6),
    (lambda x, k: x * (k if type(k) is float else 0), 6),
    (lambda x, k: x + np.full(4, k), 6),
    (lambda x, k: abs(x) ** k, 2),
]
OF_INTEGERS: list[tuple[Callable[[Any, Any], Any], int]] = [
    (lambda x, k: x * k + k, 2),
    (lambda x, k: x * (k**-0.5) + k // 2 + k % 3, 2),
    (lambda x, k: x if k % 3 else x * k, 3),
    (lambda x, k: (x, k, 2**k), 2),
    (lambda x, k: Z * k, 6),
    (lambda x, k: (x + 1).sum(axis=k % 2), 6),
    (lambda x, k: x[:, : k % 4 + 1] + np.arange(k).sum(), 6),
    (lambda x, k: x * (k if type(k) is int else 0), 6),
    (lambda x, k: x * {1: 2, 2: 5}.get(k, k), 6),
]


@pytest.mark.parametrize("number", range(len(OF_FLOATS) + len(OF_INTEGERS)))
def test_functions_do_with_variables_as_with_arguments(number: int) -> None:
    function, plans = [*OF_FLOATS, *OF_INTEGERS][number]
    reading, assign_k = variable(function)
    fused = cf.fuse(reading)
    values = (0.5, 3.0, 1.0, 0.25, 2.5) if number < len(OF_FLOATS) else (1, 2, 3, 5, 7)
    for k in (*values, *values[::-1], *values):
        assign_k(k)
        assert_same(fused(X), reading(X))
    # The first value has another plan once the number is one of the call.
    assert len(fused.plans) == plans


AWKWARD = (0.5, math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 3, 2**70, 3.0, True, 1, 1.0, np.float32(2))


@pytest.mark.parametrize("where", ["closure", "global", "dict"])
def test_awkward_values_and_other_types(where: str) -> None:
    held: dict[str, Any] = {}

    def function(x: Any, k: Any) -> Any:
        return x * k, k + 1, np.where(x > k, x, k)

    reading, assign_k = variable(function)
    if where == "global":
        reading, assign_k = (lambda x: function(x, RATE)), (lambda value: assign(RATE=value))
    elif where == "dict":
        reading, assign_k = (lambda x: function(x, held["k"])), (lambda value: held.update(k=value))
    fused = cf.fuse(reading)
    with np.errstate(all="ignore"):
        for k in (*AWKWARD, *AWKWARD[::-1], *AWKWARD):
            assign_k(k)
            assert_same(fused(X), reading(X))
    assign_k(10**400)
    with pytest.raises(OverflowError):
        fused(X)
    for other in ("text", None, [1.0]):
        assign_k(other)
        with pytest.raises((TypeError, cf.TraceError)):
            fused(X)
    assign_k(0.75)
    assert_same(fused(X), reading(X))


def test_an_array_in_the_place_of_a_number() -> None:
    fused = cf.fuse(lambda x: x * RATE)
    for rate in (0.5, 0.25, np.float32([1, 2, 3, 4]), 0.125, np.float32([4, 3, 2, 1]), 3):
        assign(RATE=rate)
        assert_equal(fused(X), X * rate)


def scale(x: Any) -> Any:
    return x * RATE


def falling(x: Any, n: int) -> Any:
    return scale(x) + RATE * n if n == 0 else falling(x * OTHER, n - 1)


def wrapped(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) * factor * RATE

    return wrapper


@functools.lru_cache
def cached(k: int) -> Any:
    return k * OTHER


def test_functions_further_in() -> None:
    """The same global in several of them, recursion, a decorator, a fused function, one with a cache, one among the
    arguments."""
    inner = cf.fuse(lambda x: scale(x) - RATE)
    decorated = wrapped(scale, 3.0)
    fused = cf.fuse(lambda x, f: RATE * falling(x, 3) + inner(x) + decorated(x) + cached(2) + f(x))
    for k in range(20):
        assign(RATE=0.1 * 0.9**k, OTHER=2.0 + k // 5)
        cached.cache_clear()
        assert_same(fused(X, scale), fused.__wrapped__(X, scale))
        cached.cache_clear()
    assert len(fused.plans) <= 4


def test_closures_that_are_made_anew() -> None:
    def scaled(k: float) -> Callable[[Any], Any]:
        return lambda x: x * k

    fused, pairs = cf.fuse(lambda x: HELD(x) + 1), cf.fuse(lambda x, f, g: f(x) - g(x))
    for k in range(20):
        assign(HELD=scaled(0.9**k))
        assert_same(fused(X), HELD(X) + 1)
        f, g = scaled(2.0), scaled(1.0 + k)
        assert_same(pairs(X, f, g), f(X) - g(X))
    assert len(fused.plans) == len(pairs.plans) == 2


class Settings:
    def __init__(self, rate: float):
        self.rate, self.axis, self.name = rate, 1, "sgd"
        self.betas = [0.9, 0.99]


@dataclass(frozen=True)
class Frozen:
    rate: float
    axis: int = 1


# What holds a number, and how it is read and replaced.
HOLDERS: dict[str, tuple[Callable[[float], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda k: (k, 1, (k,)), lambda x: (x * HELD[0] + HELD[2][0]).sum(axis=HELD[1])),
    "list": (lambda k: [k, 1], lambda x: (x * HELD[0]).sum(axis=HELD[1])),
    "dict": (lambda k: {"rate": k, "axis": 1}, lambda x: (x * HELD["rate"]).sum(axis=HELD["axis"])),
    "namespace": (lambda k: SimpleNamespace(rate=k, axis=1), lambda x: (x * HELD.rate).sum(axis=HELD.axis)),
    "object": (Settings, lambda x: (x * HELD.rate + HELD.betas[1]).sum(axis=HELD.axis)),
    "dataclass": (Frozen, lambda x: (x * HELD.rate).sum(axis=HELD.axis)),
    "partial": (lambda k: functools.partial(np.multiply, k), lambda x: HELD(x)),
    "objects": (lambda k: [Settings(k), Settings(1.0)], lambda x: x * HELD[0].rate + HELD[1].rate),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_numbers_that_variables_hold(kind: str) -> None:
    make, function = HOLDERS[kind]
    fused = cf.fuse(function)
    for k in range(30):
        assign(HELD=make(0.9**k))
        assert_same(fused(X), function(X))
    assert len(fused.plans) == 2


def test_numbers_that_are_replaced_in_place_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside variables that are assigned."""
    settings, table = Settings(0.5), {"k": 1, "more": [2.0]}
    fused = cf.fuse(lambda x: x * settings.rate + table["k"] * table["more"][0] - RATE * x)
    for k in range(40):
        if k == 30:
            no_walks(monkeypatch)
        settings.rate, table["k"], table["more"] = 0.9**k, k, [k / 2]
        assign(RATE=0.1 * k)
        assert_same(fused(X), fused.__wrapped__(X))
    assert len(fused.plans) == 2


def test_variables_that_are_assigned_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: x * RATE + len(str(COUNT)) + COUNT // 5 + (1.0 if OTHER > 3 else OTHER))
    for k in range(120):
        if k == 100:
            no_walks(monkeypatch)
        assign(RATE=0.9**k, COUNT=4 + k % 2, OTHER=k % 5 / 1)
        assert_same(fused(X), fused.__wrapped__(X))
    assert len(fused.plans) == 5, "of constants, and for two outcomes and two values"


def test_objects_with_methods() -> None:
    """Of methods that are called further in, globals are compared; of the fused function's own object all are read."""

    class Network:
        scale = 2.0

        def __init__(self) -> None:
            self.k = 1.0

        def helper(self, x: Any) -> Any:
            return x * OTHER * self.scale

        def forward(self, x: Any) -> Any:
            return self.helper(x) * self.k + RATE

    network = Network()
    bound, method = cf.fuse(network.forward), cf.fuse(Network.forward)
    for k in range(12):
        network.k = 0.9**k
        assign(RATE=0.1 * k, OTHER=1.0 + k // 6)
        Network.scale = 2.0 + k // 4
        assert_same(bound(X), network.forward(X))
        assert_same(method(network, X), network.forward(X))
    assert len(bound.plans) <= 8 and len(method.plans) <= 8


def test_variables_that_methods_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose values are compared: where a variable is read again, the method's is not."""
    monkeypatch.setattr("cupyfuse.api.inline_cache._WALKED", 2)

    class Plain:
        def apply(self, x: Any) -> Any:
            return x * RATE

    class Holding(Plain):
        def __init__(self) -> None:
            self.k = 1.0

    plain, holding, table = Plain(), Holding(), [1.0]
    functions = [
        lambda x, o: plain.apply(x) + RATE * table[0],
        lambda x, o: Plain().apply(x) + RATE,
        lambda x, o: Plain.apply(o, x) + RATE * table[0],
        lambda x, o: o.apply(x) + RATE,
        lambda x, o: holding.apply(x) + RATE + holding.k,
    ]
    for function in functions:
        fused = cf.fuse(function)
        for k in range(20):
            assign(RATE=0.9 ** (k // 5))
            assert_same(fused(X, holding), function(X, holding))


def test_bound_arguments_and_default_values_are_constants() -> None:
    def function(x: Any, w: Any, k: float = 2.0) -> Any:
        return x * k + (w.sum(axis=0) * RATE + COUNT)

    fused = cf.fuse(function)
    w = np.ones((5, 4), np.float32)
    serve = fused.bind(w=w, k=3.0)
    for k in range(20):
        assign(RATE=0.9**k, COUNT=k)
        assert_same(fused(X, w), function(X, w))
        assert_same(serve(X), function(X, w, 3.0))
        if k == 10:
            w[:] = 2
            serve.refresh()
    assert len(fused.plans) == 2 and len(serve.plans) == 2


def with_new_function(fused: Fused, k: float, n: int) -> Any:
    return fused(X, lambda x, rate=k, *, count=n: x * rate + count)


def with_replaced_defaults(fused: Fused, k: float, n: int) -> Any:
    helper.__defaults__, helper.__kwdefaults__ = (k,), {"count": n}
    return fused(X, helper)


def helper(x: Any, rate: float = 0.5, *, count: int = 1) -> Any:
    return x * rate + count


@pytest.mark.parametrize("call", [with_new_function, with_replaced_defaults])
def test_default_values_of_functions_that_it_calls(call: Callable[[Fused, float, int], Any]) -> None:
    """As of the variables that they read: a function made in each call, as `lambda x, k=k: ...`, needs two plans."""
    fused = cf.fuse(lambda x, function: function(x) * 2)
    for k in (*range(12), 3, 0):
        assert_same(call(fused, 0.9**k, k), (X * 0.9**k + k) * 2)
    assert len(fused.plans) == 2


def test_default_values_whose_values_are_needed() -> None:
    """An axis, and what decides a branch: a plan for each."""
    fused = cf.fuse(lambda x, function: function(x))
    for k in (0, 1, 0, -1, 1):
        assert_same(fused(X, lambda x, axis=k: x.sum(axis=axis)), X.sum(axis=k))
        assert_same(fused(X, lambda x, k=k: x * 2 if k > 0 else x), X * 2 if k > 0 else X)


def test_static_variables_are_compared() -> None:
    fused = cf.fuse(lambda x: x * RATE + COUNT, static=("RATE",))
    for k in range(8):
        assign(RATE=0.5**k, COUNT=k)
        assert_same(fused(X), X * RATE + COUNT)
    assert len(fused.plans) == 8


def test_a_target_and_a_change_in_place() -> None:
    def change(x: Any) -> Any:
        x += RATE
        return x * COUNT

    fused, changing, out = cf.fuse(lambda x: x * RATE), cf.fuse(change), np.empty_like(X)
    x, y = X.copy(), X.copy()
    for k in range(12):
        assign(RATE=0.9**k, COUNT=k)
        assert fused(X, out=out) is out
        assert_equal(out, X * RATE)
        assert_equal(changing(x), change(y))
        assert_equal(x, y)
    assert len(changing.plans) == 2


def test_shards_and_plans_take_the_value_of_the_call() -> None:
    def head(x: Any, w: Any) -> Any:
        return cf.logsumexp(x @ w.T * RATE, axis=1) + COUNT

    x, w = np.ones((2, 4), np.float32), np.arange(20, dtype=np.float32).reshape(5, 4)
    fused = cf.fuse(head)
    parts = cf.partial(fused, {"w": 0}, length=5)
    for k in range(5):
        assign(RATE=0.5**k, COUNT=k)
        np.testing.assert_allclose(fused(x, w), head(x, w), rtol=1e-6)
        shards = [parts.local(x, w[:2]), parts.local(x, w[2:], start=2)]
        total = parts.combine([shard.state for shard in shards])
        np.testing.assert_allclose(parts.finish(total, shards[0]), head(x, w), rtol=1e-6)
        assert fused.plan(x, w).launches >= 1


def test_dask_arrays_take_the_value_of_the_call() -> None:
    da = pytest.importorskip("dask.array")
    fused = cf.fuse(lambda x: (x * RATE + COUNT).sum(axis=1))
    lazy = []
    for k in range(4):
        assign(RATE=0.5**k, COUNT=k)
        fused(X)
        lazy.append((fused(da.from_array(X, chunks=(2, 4))), fused.__wrapped__(X)))
    for result, expected in lazy:
        np.testing.assert_allclose(result.compute(), expected, rtol=1e-6)


def test_numbers_that_python_refuses_are_errors_of_that_call_alone() -> None:
    fused = cf.fuse(lambda x: x * (1 / COUNT))
    for k in (1, 2, 4):
        assign(COUNT=k)
        assert_equal(fused(X), X * (1 / k))
    assign(COUNT=0)
    with pytest.raises(ZeroDivisionError):
        fused(X)
    assign(COUNT=5)
    assert_equal(fused(X), X * (1 / 5))


def test_an_assignment_is_refused() -> None:
    def counting(x: Any) -> Any:
        global COUNT
        COUNT += 1
        return x * COUNT

    with pytest.raises(TypeError, match="COUNT"):
        cf.fuse(counting)(X)


def test_one_that_is_needed_does_not_keep_another_from_being_open() -> None:
    fused = cf.fuse(lambda x: x.sum(axis=COUNT) * RATE)
    for k in range(12):
        assign(RATE=0.9**k, COUNT=k % 2)
        assert_same(fused(X), X.sum(axis=COUNT) * RATE)
    assert len(fused.plans) == 3, "of constants, and for each axis"


def test_beyond_so_many_branches_plans_are_for_values() -> None:
    fused = cf.fuse(lambda x: x + next(n for n in range(100) if n >= COUNT))
    for k in (*range(40), *range(0, 40, 3)):
        assign(COUNT=k)
        assert_equal(fused(X), X + k)


def test_values_that_another_thread_assigns() -> None:
    fused = cf.fuse(lambda x: x * 0 + COUNT)
    x, turns, done = np.zeros(4), [threading.Event(), threading.Event()], 60

    def count() -> None:
        for k in range(done):
            turns[0].wait(10)
            turns[0].clear()
            assign(COUNT=k * k)
            turns[1].set()

    thread = threading.Thread(target=count)
    thread.start()
    for k in range(done):
        turns[0].set()
        assert turns[1].wait(10)
        turns[1].clear()
        assert_equal(fused(x), x + k * k)
    thread.join()
    assert len(fused.plans) == 2


def test_values_that_another_thread_assigns_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call reads what the variable has held between its begin and its end."""
    monkeypatch.setattr("cupyfuse.api.inline_cache._WALKED", 1)
    fused = cf.fuse(lambda x: x * 0 + COUNT)
    for k in range(3):
        assign(COUNT=k)  # known to change: a trace takes no constant of another thread
        fused(np.zeros(4))
    stop, before = threading.Event(), sys.getswitchinterval()
    wrong: list[Any] = []
    calls: list[int] = []

    def count() -> None:
        while not stop.is_set():
            assign(COUNT=COUNT + 1)

    def call() -> None:
        x = np.zeros(4)
        for _ in range(300):
            first = COUNT
            found = fused(x)
            last = COUNT
            if not first <= found[0] <= last or (found != found[0]).any():
                wrong.append((first, found, last))
        calls.append(300)

    sys.setswitchinterval(1e-5)
    try:
        writer, readers = threading.Thread(target=count), [threading.Thread(target=call) for _ in range(3)]
        for thread in (writer, *readers):
            thread.start()
        for thread in readers:
            thread.join()
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(before)
    assert not wrong and len(calls) == 3


def test_what_changes_while_a_function_is_traced_is_not_kept() -> None:
    """As another thread may do it."""
    during: list[Any] = [7.0]

    class Hook:
        def __call__(self) -> float:
            assign(RATE=during[0])
            return 1.0

    fused = cf.fuse(lambda x, hook: x * hook() * RATE, static=("hook",))
    hook = Hook()
    fused(X, hook)
    during[0] = 0.1
    assign(RATE=0.1)
    assert_same(fused(X, hook), X * np.float32(0.1))


@pytest.mark.parametrize("kind", ["number", "dict", "argument", "bound"])
def test_what_changes_between_reading_and_tracing_is_not_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may do it: variables, what they hold, and what arguments hold."""
    table = {"k": 0.1}

    def function(x: Any, t: Any) -> Any:
        return x * (RATE if kind == "number" else t["k"] if kind in ("argument", "bound") else RATE * table["k"])

    def assign_k(value: float) -> None:
        assign(RATE=value if kind == "number" else 1.0)
        table["k"] = value

    trace = Fused._trace

    def change_and_trace(*args: Any, **kwargs: Any) -> Any:
        assign_k(7.0)
        return trace(*args, **kwargs)

    fused = cf.fuse(function)
    call = fused.bind(t=table) if kind == "bound" else functools.partial(fused, t=table)
    assign_k(0.1)
    with monkeypatch.context() as patch:
        patch.setattr(Fused, "_trace", change_and_trace)
        call(X)
    assign_k(0.1)
    assert_same(call(X), X * np.float32(0.1))


def test_functions_that_objects_hold_read_the_same_variables() -> None:
    """Where the class of the object holds what is mutable, so that its methods are read in each call."""

    class Layer:
        scales: ClassVar[list[float]] = [1.0]

        def __init__(self) -> None:
            self.act = with_arrays

        def run(self, x: Any) -> Any:
            return self.act(x) * self.scales[0]

    layer = Layer()
    fused = cf.fuse(lambda x, layer: layer.run(x) * RATE + ROW)
    for k in range(12):
        assign(RATE=0.9**k)
        layer.scales[0] = 1.0 + k // 6
        assert_same(fused(X, layer), fused.__wrapped__(X, layer))
    assert len(fused.plans) <= 3


ROW, COLUMN = np.arange(4, dtype=np.float32), np.ones((3, 1), np.float32)


def with_arrays(x: Any) -> Any:
    return x * ROW * RATE + COUNT


class Net:
    def __init__(self) -> None:
        self.act, self.both = with_arrays, (COLUMN, with_arrays, 3.0)


def test_functions_that_objects_and_variables_hold() -> None:
    """What they read is found in one order by the signature, and in another one by the trace."""
    net = Net()
    fused = cf.fuse(lambda x: net.act(x) * net.both[2] + with_arrays(x * 2) + COLUMN * net.both[1](x))
    for k in range(20):
        assign(RATE=0.9**k, COUNT=k)
        assert_same(fused(X), fused.__wrapped__(X))
    assert len(fused.plans) == 2
