"""16-bit products with a bias: cuBLASLt as its header declares it, and on a GPU."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine, normal

import cupyfuse as cf
from cupyfuse import devices
from cupyfuse.cuda.biased_gemm import BiasedProduct
from cupyfuse.cuda.gemm import CupyBlas, Operand
from cupyfuse.errors import EngineError
from cupyfuse.plan.schedule import epilogues, rounded

_POINTER, _INT, _SIZE, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
HANDLE, STREAM = 0x7F00_0000_4D20, 5
# By the number of an attribute, its type: of a product's description, of a preference.
_DESCRIPTION = {3: _INT, 4: _INT, 7: _INT, 8: _POINTER}
_PREFERENCE = {3: ctypes.c_uint32, **dict.fromkeys((5, 6, 7, 8), ctypes.c_uint32)}


class Lt:
    """cuBLASLt as a loaded library: functions of C, whose arguments have the types of its header, on a CPU's memory."""

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.found = 1  # algorithms
        self.meanwhile: Callable[[], None] = lambda: None
        self.asked: list[dict[Any, Any]] = []
        self.status = dict.fromkeys(("create", "choose", "algorithm", "run"), 0)
        self._callbacks: list[Any] = []
        self.cublasLtMatmulDescCreate = self._create([_INT, _INT])
        self.cublasLtMatrixLayoutCreate = self._create([_INT, ctypes.c_uint64, ctypes.c_uint64, _LONG])
        self.cublasLtMatmulPreferenceCreate = self._create([])
        for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
            setattr(self, f"cublasLt{kind}Destroy", self._function([_POINTER], self._destroy))
        self.cublasLtMatmulDescSetAttribute = self._setter(_DESCRIPTION)
        self.cublasLtMatmulPreferenceSetAttribute = self._setter(_PREFERENCE)
        self.cublasLtMatmulAlgoGetHeuristic = self._function([*[_POINTER] * 7, _INT, _POINTER, _POINTER], self._choose)
        self.cublasLtMatmul = self._function([*[_POINTER] * 14, _SIZE, _POINTER], self._run)

    def _function(self, types: list[Any], run: Any) -> Any:
        callback = ctypes.CFUNCTYPE(_INT, *types)(lambda *arguments: run(*arguments) or 0)
        self._callbacks.append(callback)
        return ctypes.CFUNCTYPE(_INT)(ctypes.cast(callback, _POINTER).value)  # of undeclared arguments, as once loaded

    def _create(self, types: list[Any]) -> Any:
        def create(target: int, *arguments: Any) -> int:
            number = 0x10_0000_0000 + len(self._callbacks) + 16 * len(self.objects)
            while number in self.objects:
                number += 16
            self.objects[number] = {"made": arguments}
            _POINTER.from_address(target).value = number
            return self.status["create"]

        return self._function([_POINTER, *types], create)

    def _destroy(self, number: int) -> None:
        del self.objects[number]

    def _setter(self, types: dict[int, Any]) -> Any:
        def set_attribute(number: int, attribute: int, value: int, size: int) -> int:
            kind = types[attribute]
            if size != ctypes.sizeof(kind):
                return 7
            self.objects[number][attribute] = kind.from_address(value).value
            return 0

        return self._function([_POINTER, _INT, _POINTER, _SIZE], set_attribute)

    def _choose(self, handle: int, description: int, *arguments: Any) -> int:
        *_, preference, wanted, result, count = arguments
        assert handle == HANDLE and wanted == 1
        self.meanwhile()
        asked = self.objects[preference]
        self.asked.append(asked)
        words = (ctypes.c_uint64 * 8).from_address(result)
        words[7] = asked[5]  # stands for the algorithm
        _INT.from_address(result + 72).value = self.status["algorithm"]
        _INT.from_address(count).value = self.found
        return self.status["choose"]

    def _run(self, handle: int, description: int, *arguments: Any) -> int:
        alpha, b, of_b, a, of_a, beta, c, of_c, d, of_d, algorithm, workspace, size, stream = arguments
        described = self.objects[description]
        bias = described[8]
        assert (handle, workspace, size, stream, described["made"]) == (HANDLE, None, 0, STREAM, (68, 0))
        assert (c, of_c, described[7]) == (d, of_d, 4)
        scales = [ctypes.c_float.from_address(x).value for x in (alpha, beta)]
        aligned = (ctypes.c_uint64 * 8).from_address(algorithm)[7]
        assert scales == [1.0, 0.0] and not any(x % aligned for x in (a, b, d, bias))
        left, right = (self._matrix(x, of, described[n]) for x, of, n in ((b, of_b, 3), (a, of_a, 4)))
        target = self._matrix(d, of_d, 0)
        added = np.frombuffer((ctypes.c_byte * (2 * target.shape[0])).from_address(bias), target.dtype)
        target[...] = left.astype(np.float32) @ right.astype(np.float32) + added[:, None].astype(np.float32)
        return self.status["run"]

    def _matrix(self, address: int, layout: int, operation: int) -> np.ndarray[Any, Any]:
        kind, rows, cols, leading = self.objects[layout]["made"]
        dtype = {2: np.dtype(np.float16), 14: normal(np.random.default_rng(0), 1, "bfloat16").dtype}[kind]
        assert leading >= rows
        memory = np.frombuffer((ctypes.c_byte * (2 * ((cols - 1) * leading + rows))).from_address(address), dtype)
        found = np.lib.stride_tricks.as_strided(memory, (rows, cols), (2, 2 * leading))
        return found.T if operation else found


def product_of(lt: Any, turned: tuple[bool, bool], dtype: str, sizes: tuple[int, int, int] = (5, 3, 4)) -> Any:
    m, k, n = sizes
    a, b = (
        Operand(cols, rows, rows, 1) if t else Operand(rows, cols, cols, 1)
        for t, rows, cols in zip(turned, (m, k), (k, n), strict=True)
    )
    operands = [o if not t else Operand(o.cols, o.rows, 1, o.row_stride) for o, t in zip((a, b), turned, strict=True)]
    return BiasedProduct(*operands, dtype, lt, lambda: HANDLE)


def within(memory: np.ndarray[Any, Any], shape: tuple[int, ...], offset: int) -> np.ndarray[Any, Any]:
    """An array of 16-bit elements at an offset in bytes from a multiple of 512."""
    start = (-memory.ctypes.data % 512 + offset) // 2
    return memory[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [(5, 3, 4), (1, 4, 6), (6, 1, 3), (7, 2, 1)])
def test_as_the_header_declares_it(
    sizes: tuple[int, int, int], turned: tuple[bool, bool], dtype: str, rng: np.random.Generator
) -> None:
    (m, k, n), lt = sizes, Lt()
    multiply = product_of(lt, turned, dtype, sizes)
    a, b = (normal(rng, s[::-1] if t else s, dtype) for s, t in zip(((m, k), (k, n)), turned, strict=True))
    wide = [(x.T if t else x).astype(np.float32) for x, t in zip((a, b), turned, strict=True)]
    bias, out = normal(rng, n, dtype), np.full((m, n), np.nan, a.dtype)
    multiply(a.ctypes.data, b.ctypes.data, bias.ctypes.data, out.ctypes.data, STREAM)
    np.testing.assert_array_equal(out, (wide[0] @ wide[1] + bias.astype(np.float32)).astype(a.dtype))
    assert [asked[3] for asked in lt.asked] == [0, 0]


def test_algorithms_are_chosen_by_alignment(rng: np.random.Generator) -> None:
    """Of all four addresses; 256 bytes are as good as more."""
    lt, dtype = Lt(), "float16"
    multiply = product_of(lt, (False, False), dtype)
    memory = [np.zeros(1024, dtype) for _ in range(4)]
    shapes = (5, 3), (3, 4), (4,), (5, 4)
    for place in range(4):
        for offset in (0, 16, 2, 16):
            arrays = [within(x, s, offset * (place == k)) for k, (x, s) in enumerate(zip(memory, shapes, strict=True))]
            for array in arrays[:3]:
                array[...] = normal(rng, array.shape, dtype)
            a, b, bias, out = arrays
            multiply(*(x.ctypes.data for x in arrays), STREAM)
            np.testing.assert_array_equal(out, (a.astype(np.float32) @ b.astype(np.float32) + bias).astype(dtype))
    alignments = [[asked[k] for k in (5, 6, 7, 8)] for asked in lt.asked]
    assert alignments == [[n] * 4 for n in (2, 256, 16)]


def test_threads_have_biases_of_their_own(rng: np.random.Generator) -> None:
    lt, dtype, wrong = Lt(), "float16", []
    multiply = product_of(lt, (False, False), dtype)
    a, b = normal(rng, (5, 3), dtype), normal(rng, (3, 4), dtype)
    product = a.astype(np.float32) @ b.astype(np.float32)

    def work(value: float) -> None:
        bias, out = np.full(4, value, dtype), np.empty((5, 4), dtype)
        for _ in range(50):
            multiply(*(x.ctypes.data for x in (a, b, bias, out)), STREAM)
            if not np.array_equal(out, (product + np.float32(value)).astype(dtype)):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_finalizer_within_a_call_may_launch_the_same_product(rng: np.random.Generator) -> None:
    """With a bias of its own, which the call around it does not take."""
    lt, dtype = Lt(), "float16"
    multiply = product_of(lt, (False, False), dtype)
    a, b = normal(rng, (5, 3), dtype), normal(rng, (3, 4), dtype)
    biases, outs = [np.full(4, k, dtype) for k in (1, 2)], [np.empty((5, 4), dtype) for _ in range(2)]

    def launch(k: int) -> None:
        multiply(*(x.ctypes.data for x in (a, b, biases[k], outs[k])), STREAM)

    def finalizer() -> None:
        lt.meanwhile = lambda: None
        launch(1)

    lt.meanwhile = finalizer
    launch(0)
    for bias, out in zip(biases, outs, strict=True):
        wanted = a.astype(np.float32) @ b.astype(np.float32) + bias.astype(np.float32)
        np.testing.assert_array_equal(out, wanted.astype(dtype))


def test_what_it_creates_is_destroyed() -> None:
    lt = Lt()
    multiply = product_of(lt, (False, False), "float16")
    arrays = [np.zeros(64, "float16") for _ in range(4)]
    multiply(*(x.ctypes.data for x in arrays), STREAM)
    assert len(lt.objects) == 4  # three layouts, and a descriptor
    for k in range(40):
        arrays[2] = np.full(64 + k, k, "float16")
        multiply(*(x.ctypes.data for x in arrays), STREAM)
        assert arrays[3][0] == k and len(lt.objects) <= 3 + 16
    del multiply
    gc.collect()
    assert not lt.objects


@pytest.mark.parametrize(
    ("where", "function"),
    [
        ("create", "cublasLtMatrixLayoutCreate"),
        ("choose", "cublasLtMatmulAlgoGetHeuristic"),
        ("algorithm", "cublasLtMatmulAlgoGetHeuristic"),
        ("run", "cublasLtMatmul"),
    ],
)
def test_what_it_refuses(where: str, function: str) -> None:
    lt = Lt()
    lt.status[where] = 15
    arrays = [np.zeros(64, "float16") for _ in range(4)]
    with pytest.raises(EngineError, match=f"{function} failed with status 15"):
        product_of(lt, (False, False), "float16")(*(x.ctypes.data for x in arrays), STREAM)


def test_a_query_that_finds_nothing_is_an_error() -> None:
    lt = Lt()
    lt.found = 0
    arrays = [np.zeros(64, "float16") for _ in range(4)]
    with pytest.raises(EngineError, match="found no algorithm"):
        product_of(lt, (False, False), "float16")(*(x.ctypes.data for x in arrays), STREAM)


# In plans -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose products are stored rounded by the library wherever they may be."""
    chosen: Engine = request.param
    chosen.require()
    if chosen is HOST:
        monkeypatch.setattr(chosen.runtime, "device", devices.DEVICES["H200"])
    monkeypatch.setattr(rounded, "_HELD", 0)
    monkeypatch.setattr(epilogues, "WORTH", 1e9)
    monkeypatch.setattr(epilogues, "GAIN", 1e9)
    monkeypatch.setattr(epilogues, "_reason_against_product", lambda *_: "the library's is asked for")
    with chosen.active():
        yield chosen


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", [(70, 64, 136), (129, 97, 64), (1000, 2048, 512), (513, 40, 1032), (9, 257, 4096)])
def test_the_bias_is_added_before_rounding(
    engine: Engine,
    shape: tuple[int, int, int],
    turned: tuple[bool, bool],
    behind: bool,
    dtype: str,
    rng: np.random.Generator,
) -> None:
    """Each element is the nearest number to its sum, or where float32 errs, a neighbour of that.

    Of the last shape cuBLASLt would split the sums, and round them before it adds the bias.
    """
    m, k, n = shape
    plain = cf.fuse(lambda x, w, b: cf.linear(x, w, b))
    read = cf.fuse(lambda x, w, b: np.maximum(cf.linear(x, w, b), -1e4) * np.asarray(1.0, "float32"))
    fused = read if behind else plain
    x, w = (
        np.ascontiguousarray(a.T).T if t else a
        for a, t in zip((normal(rng, (m, k), dtype), normal(rng, (n, k), dtype)), turned, strict=True)
    )
    b = normal(rng, n, dtype) * np.asarray(30, x.dtype)
    arguments = [engine.array(a) for a in (x, w, b)]
    product = fused.plan(*arguments).steps[0]
    assert product.by_library and product.fused == ("matmul", "add")
    found = engine.host(fused(*arguments)).astype(np.float64)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64)
    size = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T + np.abs(b.astype(np.float64))
    unit = 2.0**-11 if dtype == "float16" else 2.0**-8
    least = float(np.finfo(np.float16).tiny) if dtype == "float16" else 1e-37
    assert (np.abs(found - exact) <= 1.001 * unit * np.maximum(np.abs(exact), least) + k * 2.0**-24 * size).all()


def test_a_bias_that_is_no_plain_argument_is_not_the_librarys(engine: Engine, rng: np.random.Generator) -> None:
    """Strided, computed, of another dtype, or one number; or of a product whose rows begin anywhere."""
    x, w = normal(rng, (70, 64), "float16"), normal(rng, (136, 64), "float16")
    b, one = normal(rng, 272, "float16"), np.ones((1, 1), "float16")
    tanh = cf.fuse(lambda x, w, b: np.tanh(x @ w.T + b) * 3)
    scaled = cf.fuse(lambda x, w, b: np.tanh(x @ w.T + b * 2) * 3)
    x, w, b, one = (engine.array(a) for a in (x, w, b, one))
    assert tanh.plan(x, w, b[:136]).steps[0].by_library
    assert not any(step.by_library for step in tanh.plan(x, w[:135], b[:135]).steps)
    for function, bias in ((tanh, b[::2]), (scaled, b[:136]), (tanh, b[:136].astype("float32")), (tanh, one)):
        assert not any(step.by_library for step in function.plan(x, w, bias).steps)


@pytest.mark.gpu
def test_cublaslt_has_an_algorithm_without_a_workspace(rng: np.random.Generator) -> None:
    """Of any shape and alignment; the bias is added before rounding: it takes off what the product was rounded to."""
    CUDA.require()
    xp, library, handle = CUDA.xp, *CupyBlas().light_library()
    for turn in range(120):
        dtype = ("float16", "bfloat16")[turn % 2]
        m, k, n = (int(2 ** rng.uniform(0, most)) for most in (9, 13, 12))
        offsets = [int(rng.integers(0, 2)) for _ in range(4)]
        x = np.broadcast_to(normal(rng, (1, k), dtype), (m, k))
        w = normal(rng, (n, k), dtype) * np.asarray(2.0**-5, x.dtype)
        exact = x[:1].astype(np.float64) @ w.T.astype(np.float64)
        bias = (-exact).astype(x.dtype)
        arrays = []
        for array, offset in zip((x, w, bias, np.full((m, n), np.nan, x.dtype)), offsets, strict=True):
            memory = CUDA.array(np.zeros(array.size + 1, x.dtype))[offset : offset + array.size].reshape(array.shape)
            memory[...] = CUDA.array(np.ascontiguousarray(array))
            arrays.append(memory)
        multiply = BiasedProduct(Operand(m, k, k, 1), Operand(k, n, 1, k), dtype, library, handle)
        multiply(*(a.data.ptr for a in arrays), xp.cuda.get_current_stream().ptr)
        found = CUDA.host(arrays[3]).astype(np.float64)
        size = np.abs(x[:1].astype(np.float64)) @ np.abs(w.T.astype(np.float64))
        wanted = exact + bias.astype(np.float64)
        allowed = 2.0**-8 * np.abs(wanted) + k * 2.0**-24 * size + 1e-7
        assert (np.abs(found - wanted) <= allowed).all(), (m, k, n, dtype, offsets)
