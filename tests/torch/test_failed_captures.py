"""What Dynamo fails to capture, or our backend to fuse: it runs in eager, and is explained."""

from __future__ import annotations

import contextvars
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_ways import Code, plain

import cupyfuse.torch as ct
from cupyfuse.torch import backend, capture, frames

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


meanwhile: list[Any] = []  # functions for `plus_one` to call, once each


@torch.library.custom_op("cupyfuse_tests::plus_one", mutates_args=())
def plus_one(x: torch.Tensor) -> torch.Tensor:
    while meanwhile:
        meanwhile.pop()()
    return x + 1


@plus_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not for compilers")


def test_code_for_compilers_is_captured_where_that_for_eager_cannot_be(capfd: Any) -> None:
    """As in mixtures of experts of transformers, whose grouped product takes bfloat16 alone under compilers."""

    def code(m: Any, x: Any) -> Any:
        y = m.linear(x)
        return torch.softmax(F.gelu(y + 1 if torch.compiler.is_compiling() else plus_one(y)) * 2, -1)

    fused = ct.fuse(module := Code(code), only_gains=False)
    (x,) = plain()
    torch.testing.assert_close(fused(x), module(x))
    (part,) = ct.explain(fused).left
    assert "not for compilers" in part.reason
    assert "the next call tries to capture it" in part.reason
    for _ in range(2):
        torch.testing.assert_close(fused(x), module(x))
    explained = ct.explain(fused)
    (chain,) = explained.fused
    assert "softmax" in chain.code
    assert not explained.left
    assert not capfd.readouterr().err


def test_all_parts_of_a_call_find_the_same_answer() -> None:
    """Code before a graph break lays a value out for compilers or for eager, code behind it reads it."""

    def code(m: Any, x: Any) -> Any:
        h = m.linear(x)
        h = h + 1 if torch.compiler.is_compiling() else plus_one(h).T
        torch._dynamo.graph_break()
        return torch.softmax((h if torch.compiler.is_compiling() else h.T) * 2, -1)

    fused = ct.fuse(module := Code(code), only_gains=False)
    for rows in (5, 5, 7, 7):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(fused(x), module(x))


def test_calls_that_raise_do_not_change_others() -> None:
    def code(m: Any, x: Any) -> Any:
        y = torch.softmax(m.linear(x), -1)
        if not torch.compiler.is_compiling():
            m.calls += 1
            y.view(-1, 2, 12)
        return y

    module = Code(code, calls=0)
    fused = ct.fuse(module, only_gains=False)
    for rows in (4, 5, 6, 5, 8, 4):
        x = torch.randn(rows, 12)
        for each in (module, fused):
            if rows % 2:
                with pytest.raises(RuntimeError):
                    each(x)
            else:
                each(x)
        assert fused.calls == module.calls


def test_an_interrupted_call_is_settled_as_one_that_raises() -> None:
    """What it could not capture is not counted to the thread's next call."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    fused = ct.fuse(module := Code(lambda m, x: torch.softmax(plus_one(m.linear(x)) * 2, -1)), only_gains=False)
    (x,) = plain()
    meanwhile.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fused(x)
    callback = fused._cupyfuse._callback
    assert callback.calls == 1 and not callback.unsettled
    torch.testing.assert_close(fused(x), module(x))


def test_a_capture_that_cannot_begin_tells_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed() -> Any:
        raise RuntimeError("no such function in this version")

    monkeypatch.setattr(frames, "running_eagerly", changed)
    fused = ct.fuse(module := Code(lambda m, x: torch.softmax(m.linear(x) * 2, -1)), only_gains=False)
    (x,) = plain()
    torch.testing.assert_close(fused(x), module(x))
    left = ct.explain(fused).left
    assert left and all("no such function in this version" in part.reason for part in left)


variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)


def graphs(module: Any) -> list[list[str]]:
    """The names of the operations in each captured graph."""
    return [[o.name for o in p.captured.operations] for p in module._cupyfuse.partitions]


def breaking(m: Any, x: Any) -> Any:
    """The number tells the answer; both answers have the same operations."""
    compiled = torch.compiler.is_compiling()
    y = m.linear(x).exp()
    if not compiled:
        variable.set("set")  # breaks the graph
    return y.softmax(-1) * (3.0 if compiled else 2.0)


def test_code_whose_graph_breaks_in_eager_alone_is_captured_whole_from_the_second_call_on() -> None:
    fused = ct.fuse(module := Code(breaking), only_gains=False)
    for rows, factor in ((5, 1.0), (5, 1.5), (7, 1.5), (5, 1.5)):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(fused(x), module(x) * factor)
        assert {len(names) for names in graphs(fused)} == ({2} if factor == 1 else {4})
    explained = ct.explain(fused)
    assert all("softmax" in chain.code for chain in explained.fused)
    assert not explained.left


def test_other_arguments_may_be_captured_in_parts_still() -> None:
    """Where compiled code cannot be one graph, all of the call finds that it is not compiled."""

    def code(m: Any, x: Any) -> Any:
        y = breaking(m, x)
        if len(x) > 5:
            torch._dynamo.graph_break()
        return y * (0.5 if torch.compiler.is_compiling() else 0.25)

    fused = ct.fuse(module := Code(code), only_gains=False)
    for rows, factors in ((5, (1.0,)), (5, (3.0,)), (7, (1.0,)), (5, (1.0, 3.0)), (7, (1.0,))):
        x = torch.randn(rows, 12)
        factor = (fused(x) / module(x)).mean().item()
        assert min(abs(factor - each) for each in factors) < 1e-3


def test_compiled_code_with_other_operations_is_not_taken() -> None:
    """It may be slower, such as attention with a mask that excludes nothing."""

    def code(m: Any, x: Any) -> Any:
        compiled = torch.compiler.is_compiling()
        y = m.linear(x)
        if not compiled and variable.set("set") and bool((x == x).all()):
            return F.softmax(y, -1)
        return F.softmax(y.where(x == x, 0), -1) * 2

    fused = ct.fuse(module := Code(code), only_gains=False)
    found = []
    for rows in (5, 5, 5, 5):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(fused(x), module(x))
        found.append(graphs(fused))
    assert found[0] and not any("where" in names for names in found[-1])
    assert len(found[1]) == len(found[2]) == len(found[3])


def test_operations_that_later_calls_add_are_captured_whole_too() -> None:
    def code(m: Any, x: Any, more: bool) -> Any:
        y = breaking(m, x)
        return y.neg() if more else y

    fused = ct.fuse(module := Code(code), only_gains=False)
    for more, whole in ((False, False), (False, True), (True, False), (True, True), (False, True)):
        x = torch.randn(5, 12)
        torch.testing.assert_close(fused(x, more), module(x, more) * (1.5 if whole else 1.0))


def lay_out(m: Any, x: Any) -> Any:
    h = m.linear(x)
    if torch.compiler.is_compiling():
        return h
    variable.set("set")
    return h.T


def test_code_that_is_left_to_eager_finds_the_answer_of_captured_code() -> None:
    """Dynamo captures the function that it calls alone, which could be one graph as compiled code."""

    def code(m: Any, x: Any) -> Any:
        try:
            h = lay_out(m, x)
            torch._dynamo.graph_break()
            return torch.softmax(h if torch.compiler.is_compiling() else h.T, -1)
        finally:
            variable.set(None)

    fused = ct.fuse(module := Code(code), only_gains=False)
    for rows in (5, 5, 7, 7):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(fused(x), module(x))


def test_calls_in_parts_that_raise_do_not_have_others_captured_whole() -> None:
    def code(m: Any, x: Any) -> Any:
        y = torch.softmax(m.linear(x), -1)
        if not torch.compiler.is_compiling():
            variable.set("set")
            m.calls += 1
            if len(x) % 2:
                raise ValueError("an odd number of rows")
        return y

    module = Code(code, calls=0)
    fused = ct.fuse(module, only_gains=False)
    for rows in (5, 5, 7, 9, 4):
        x = torch.randn(rows, 12)
        for each in (module, fused):
            if rows % 2:
                with pytest.raises(ValueError):
                    each(x)
            else:
                each(x)
        assert fused.calls == module.calls


@torch._dynamo.disable
def pause() -> None:
    while meanwhile:
        meanwhile.pop()()


def test_a_call_in_parts_finds_one_answer_while_another_thread_captures_the_whole() -> None:
    def code(m: Any, x: Any) -> Any:
        h = m.linear(x)
        if not torch.compiler.is_compiling():
            pause()
            h = h.T
        return torch.softmax(h if torch.compiler.is_compiling() else h.T, -1)

    def call_in_a_thread() -> None:
        thread = threading.Thread(target=lambda: [fused(x) for _ in range(3)])
        thread.start()
        thread.join()

    fused = ct.fuse(module := Code(code), only_gains=False)
    (x,) = plain()
    meanwhile.append(call_in_a_thread)
    for _ in range(3):
        torch.testing.assert_close(fused(x), module(x))
    assert graphs(fused) == [["linear", "softmax"]]


def test_a_failed_capture_leaves_autograd_as_it_is() -> None:
    """Dynamo cannot capture layer normalization under `jvp`; what it left switched autograd off later."""
    normalization = nn.LayerNorm(12)

    def code(m: Any, x: Any) -> Any:
        return torch.func.jvp(lambda z: normalization(m.linear(z)), (x,), (torch.ones_like(x),))

    fused = ct.fuse(module := Code(code))
    (x,) = plain()
    for _ in range(2):
        torch.testing.assert_close(fused(x), module(x))
        gc.collect()
        assert module.linear(x).requires_grad


def switched_off() -> Any:
    return torch.set_grad_enabled(False)


def in_a_helper(m: Any, x: Any) -> Any:
    with switched_off():
        y = plus_one(m.linear(x))
    return m.linear(y)


def before_a_graph_break(m: Any, x: Any) -> Any:
    off = torch.set_grad_enabled(False)
    torch._dynamo.graph_break()
    with off:
        y = m.linear(x)
    return m.linear(y)


def later(m: Any, x: Any) -> Any:
    off, y = torch.no_grad(), m.linear(x)
    torch._dynamo.graph_break()
    y = m.linear(y)
    with off:
        return y + m.linear(x)


def kept(m: Any, x: Any) -> Any:
    m.off = torch.no_grad()
    return m.linear(x)


def for_good(m: Any, x: Any) -> Any:
    torch.set_grad_enabled(False)
    torch._dynamo.graph_break()
    return m.linear(x)


@pytest.mark.parametrize("code", (in_a_helper, before_a_graph_break, later, kept, for_good))
def test_gradients_are_switched_as_in_eager(code: Any) -> None:
    """Dynamo makes objects such as `torch.no_grad()` anew, which switches gradients off, where they outlive a graph."""
    fused = ct.fuse(module := Code(code))
    (x,) = plain()
    for _ in range(2):
        found = []
        for each in (module, fused):
            with torch.enable_grad():
                found.append((each(x).requires_grad, torch.is_grad_enabled()))
        assert found[0] == found[1]


def test_failed_captures_forget_nothing_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def code(m: Any, x: Any) -> Any:
        y = torch.softmax(m.linear(x) * 2, -1)
        return y if len(x) > 3 else plus_one(y)

    fused, forget = ct.fuse(Code(code), only_gains=False), capture.Capture.forget
    other = threading.Thread(target=fused, args=(torch.randn(4, 12),))

    def forget_later(*arguments: Any) -> None:
        if other.ident is None:
            other.start()
            other.join(1)  # or it waits for this thread
        forget(*arguments)

    monkeypatch.setattr(capture.Capture, "forget", forget_later)
    fused(torch.randn(3, 12))
    other.join()
    (chain,) = ct.explain(fused).fused
    assert chain.plans


def test_threads_agree_on_code_for_compilers() -> None:
    """A call ends within another one; both have found that the code is to be captured as compiled code."""

    def code(m: Any, x: Any) -> Any:
        y = torch.softmax(m.linear(x) * 2, -1)
        return y + 1 if torch.compiler.is_compiling() else plus_one(y)

    def call_in_a_thread() -> None:
        thread = threading.Thread(target=fused, args=(x,))
        thread.start()
        thread.join()

    fused = ct.fuse(module := Code(code), only_gains=False)
    (x,) = plain()
    meanwhile.append(call_in_a_thread)
    for _ in range(3):
        torch.testing.assert_close(fused(x), module(x))
    assert "not captured" not in str(ct.explain(fused))


def test_a_backend_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise ValueError("no plan")

    monkeypatch.setattr(capture, "fuse_module", fail)
    fused = ct.fuse(module := nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)))
    x = torch.randn(2, 4)
    torch.testing.assert_close(fused(x), module(x))
    assert "ValueError: no plan" in str(ct.explain(fused))


def test_a_graph_that_cannot_be_lowered_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no memory\nfor a plan")

    monkeypatch.setattr(backend, "lower", fail)
    fused = ct.fuse(module := nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), only_gains=False)
    x = torch.randn(2, 4)
    with pytest.warns(RuntimeWarning, match="left a captured graph to PyTorch: OutOfMemoryError: no memory"):
        torch.testing.assert_close(fused(x), module(x))
    (part,) = ct.explain(fused).left
    assert part.reason == "OutOfMemoryError: no memory" and part.code == "its own code"
