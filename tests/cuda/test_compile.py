"""Every kernel that the planner can emit for the heads compiles for every architecture, without a GPU; and what becomes
of kernels that do not compile, do not load, or find no cache, with a CuPy that does as it is told."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from support import HOST, docs_script

import cupyfuse as cf
from cupyfuse import heads
from cupyfuse.cuda import compile as compiling
from cupyfuse.cuda import emit, split
from cupyfuse.cuda.compile import cubin, load
from cupyfuse.cuda.config import Access, Config
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.fingerprint import MOST_MATRICES, fingerprint_kernel
from cupyfuse.cuda.program import Program
from cupyfuse.cuda.scan import scan_kernel
from cupyfuse.cuda.sources import kernels_of
from cupyfuse.errors import ClusterError
from cupyfuse.ir.graph import SCANS
from cupyfuse.plan.schedule.split_tiles import TILE_WIDTHS
from cupyfuse.selftest.reductions import all_reductions

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Row lengths that lead to every template, with and without vectors; few rows, and enough to split a column's.
SHAPES = ((64, 33, 96), (1024, 8192, 8192), (100_000, 5, 7), (16, 64, 50_257), (16, 64, 262_144))


def plans(dtype, shape):
    rows, k, n = shape
    x, w, b, c = cf.spec((rows, k), dtype), cf.spec((n, k), dtype), cf.spec(n, dtype), cf.spec(1, dtype)
    columns = {"running_mean": b, "running_var": b, "gamma": b, "beta": b, "scale": c}
    yield heads.head_logsumexp.plan(x, w, b)
    yield heads.head_sum.plan(x, w, b)
    yield heads.head_sum.bind(weight=w, bias=b).plan(x)
    yield heads.head_softmax.plan(x, w, b, training=True, **columns)
    bound = heads.head_softmax.bind(weight=w, bias=b, **columns).plan(x)
    yield bound
    yield bound.prepare
    yield cf.fuse(lambda y: cf.gelu(y)).plan(cf.spec((rows, n), dtype))


def template(text):
    """The file of `kernels_cu/` that a text instantiates."""
    return text.partition("\n")[0]


def without_numbers(text):
    return re.sub(r"\b\d+\b", "0", text)


@cache
def sources(dtype):
    """The distinct texts of all kernels for a dtype, in the widest vectors and in none."""
    found = set()
    for shape in SHAPES:
        for plan in plans(dtype, shape):
            for step in plan.steps:
                if step.kind not in ("Gemm", "Split", "Copy"):
                    for aligned in (None, 1):
                        found |= {k.source for k in kernels_of(step, plan.scheduled.storage, aligned)}
    return sorted(found)


def chosen(dtype, architecture):
    """Every text for one of the newer architectures, each of which gets every template; and for the oldest one.

    The headers tell architectures from 8.0 on from older ones, and no others apart. Texts that differ in numbers alone
    (widths of vectors, threads, row lengths) go to different ones, and one of them to the oldest.
    """
    texts = sources(dtype)
    if architecture == ARCHITECTURES[0]:
        return list({without_numbers(text): text for text in texts}.values())
    alike = {}
    for text in sorted(texts, key=lambda text: (without_numbers(text), text)):
        alike.setdefault(template(text), []).append(text)
    return [text for group in alike.values() for text in share(group, architecture)]


def share(texts, architecture):
    """A newer architecture's part of some texts, one at least; of the oldest architecture all."""
    if architecture == ARCHITECTURES[0]:
        return texts
    newer = ARCHITECTURES[1:]
    return texts[newer.index(architecture) % len(texts) :: len(newer)]


def compiles(text, architecture):
    return cubin(text, architecture)[:4] == b"\x7fELF"


@pytest.mark.rotates
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heads_compile(dtype, architecture):
    texts = chosen(dtype, architecture)
    assert {template(text) for text in texts} == {template(text) for text in sources(dtype)}
    assert all(compiles(text, architecture) for text in texts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_text_is_compiled_for_a_newer_architecture(dtype):
    assert {text for architecture in ARCHITECTURES[1:] for text in chosen(dtype, architecture)} == set(sources(dtype))


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [2000, 4000])
def test_all_reductions_together_compile(dtype, rows):
    """Down the columns their accumulators, one for each warp and column, fit into a block's shared memory."""
    plan = all_reductions(0).plan(cf.spec((rows, 40), dtype))
    kernels = [k for step in plan.steps for k in kernels_of(step, plan.scheduled.storage)]
    assert any(k.config.template == "column_stats" for k in kernels)
    assert all(compiles(k.source, ARCHITECTURES[0]) for k in kernels)


def two_softmaxes(x, y):
    return cf.softmax(x, axis=1) * cf.softmax(y, axis=1)


def statistics_of_columns(x):
    return x.max(0), x.argmax(0), cf.logsumexp(x, axis=0), x.sum(0), x.var(0)


@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (statistics_of_columns, [((1 << 33, 3), "float32")]),  # positions among so many rows take 64 bits
        (statistics_of_columns, [((100_000, 7), "bfloat16")]),
        (two_softmaxes, [((4096, 32768), "bfloat16")] * 2),
    ],
    ids=["columns of 2^33 rows", "columns", "shares"],
)
def test_totals_fit_into_what_is_allocated_for_them(function, specs):
    plan = cf.fuse(function).plan(*(cf.spec(*spec) for spec in specs))
    for step in plan.steps:
        size = Program(step, plan.scheduled.storage).state_size
        for kernel in kernels_of(step, plan.scheduled.storage, clusters=True):
            check = f'static_assert(sizeof(Program::Totals0) <= {size}, "as allocated");'
            assert cubin(f"{kernel.source}\n{check}", "sm_90")


@pytest.mark.rotates
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_120"])
def test_kernels_of_shared_rows_compile(architecture):
    for dtype in DTYPES:
        plan = cf.fuse(lambda x: cf.logsumexp(x, axis=1)).plan(cf.spec((2, 40000), dtype))
        kernels = [k for step in plan.steps for k in kernels_of(step, plan.scheduled.storage)]
        assert dtype == "float64" or [k.name for k in kernels] == ["row_shares_kernel", "row_merge_kernel"]
        assert all(compiles(k.source, architecture) for k in kernels)


WITH_POSITIONS = [(3000, 100), (3000, 5000), (2, 40000), (2, 1 << 32)]


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WITH_POSITIONS)
def test_positions_compile(shape, dtype):
    """In short rows, long ones, shared ones, and where they take 64 bits."""
    # One architecture a case, so that every shape and every dtype has all three.
    turn = WITH_POSITIONS.index(shape) + DTYPES.index(dtype)
    architecture = ("sm_75", "sm_90", "sm_120")[turn % 3]
    plan = cf.fuse(lambda x: (x.argmax(axis=1), x.argmin(axis=1), x.max(axis=1))).plan(cf.spec(shape, dtype))
    (step,) = plan.steps
    for kernel in kernels_of(step, plan.scheduled.storage):
        assert ("u64> t" in kernel.source) == (shape[1] == 1 << 32)
        assert compiles(kernel.source, architecture)


def plain_kernels(width):
    """The kernels of a split product that is stored."""
    return split.product_kernels(split.plain_program((300, 400)), width, 2)


@pytest.mark.rotates
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_of_the_split_compile(architecture):
    _, repair = plain_kernels(64)
    for kernel in share([split.split_rows_kernel(), split.split_columns_kernel(), repair], architecture):
        assert compiles(kernel.source, architecture)


def test_the_repair_has_each_of_its_loops_once():
    """For marked rows of either operand, and for whole groups and the last: as copies they take a second to compile."""
    _, repair = plain_kernels(64)
    assert len(cubin(repair.source, "sm_90")) < 64 << 10


@pytest.mark.rotates
@pytest.mark.parametrize(
    "kernel",
    [*(plain_kernels(width)[0] for width in TILE_WIDTHS), *(split.split_columns_kernel(cluster=c) for c in (2, 4, 8))],
    ids=lambda kernel: f"{kernel.name}{kernel.cluster}",
)
def test_what_only_hopper_has_compiles(kernel):
    assert compiles(kernel.source, f"sm_{kernel.arch}")


@pytest.mark.parametrize("by_warps", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scans_compile(dtype, by_warps):
    for op, architecture in zip(SCANS, (ARCHITECTURES[0], "sm_90"), strict=True):
        assert compiles(scan_kernel(op, dtype, by_warps).source, architecture)


@pytest.mark.rotates
def test_the_largest_fingerprint_compiles():
    assert compiles(fingerprint_kernel(MOST_MATRICES).source, ARCHITECTURES[0])


@pytest.mark.rotates
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_checks_and_prepares_weights_compiles(architecture):
    """The fingerprint, and every kernel that runs only where it has changed."""
    texts = {fingerprint_kernel(count).source for count in (1, 2, 7)}
    texts |= {split.split_rows_kernel(True).source, split.split_columns_kernel(True).source}
    for shape in SHAPES[:2]:
        plan = list(plans("float32", shape))[-2]
        for step in plan.steps:
            if step.kind in ("Gemm", "Split", "Copy"):
                continue
            program = Program(step, plan.scheduled.storage)
            config = default_config(program, Access(1))
            texts.add(emit.emit(program, config, conditional=True).source)
            if config.template == "column_stats":
                texts.add(emit.emit(program, config, merge=True, conditional=True).source)
    assert all("const u32* changed;" in text for text in texts if "fingerprint" not in text)
    assert all(compiles(text, architecture) for text in share(sorted(texts), architecture))


def test_guards_of_nested_products_compile():
    """What a guard evaluates as written can be products of products, which nothing else computes."""
    for function, shapes in (
        (lambda x, a, b: (x @ a.T @ b.T).sum(axis=1), ((8, 16), (20, 16), (30, 20))),
        (lambda x, a, b: (x.sum(axis=1, keepdims=True) @ a + a).sum(axis=1) + b, ((2, 2), (1, 2), (2,))),
        (lambda x: ((-x @ x.T) @ x).sum(axis=1), ((2, 0),)),
    ):
        plan = cf.fuse(function).plan(*map(cf.spec, shapes))
        for step in plan.steps:
            if step.kind not in ("Gemm", "Split", "Copy"):
                for kernel in kernels_of(step, plan.scheduled.storage):
                    assert cubin(kernel.source, "sm_90")


def test_every_operator_compiles_in_both_types():
    """One kernel with every operator of the table in it, for float and for double; and for integers those on them."""
    from cupyfuse.ir.operators import POINTWISE
    from cupyfuse.trace import apply

    def everything(x, y, z):
        total = x
        for name, row in POINTWISE.items():
            if not (row.takes_floats if x.dtype.kind == "f" else row.gives_integers):
                continue
            operands = (x > y, y, z) if name == "where" else (x, y, z)[: row.arity]
            if name.startswith("logical"):
                operands = tuple(o > 0 for o in operands)
            value = apply(name, *operands)
            total = total + value.astype(x.dtype)
        return total

    for dtype in ("float32", "float64", "int8", "uint32", "int64"):
        plan = cf.fuse(everything).plan(*[cf.spec((8, 64), dtype)] * 3)
        (kernel,) = kernels_of(plan.steps[0], plan.scheduled.storage)
        assert cubin(kernel.source, "sm_90")


def test_guards_add_little_code():
    """In line, what seldom runs would be there for each of the 32 elements of a thread: thrice the time to compile."""

    def standardised(x):
        y = x - x.mean(axis=1, keepdims=True)
        y = y / np.sqrt((y * y).mean(axis=1, keepdims=True))
        return np.tanh(y) * np.log1p(np.abs(y))

    plan = cf.fuse(standardised).plan(cf.spec((4096, 1024)))
    (kernel,) = kernels_of(plan.steps[0], plan.scheduled.storage)
    unguarded, count = re.subn(r"(has_exact\(int stage\) \{ return) [^;]+;", r"\1 false;", kernel.source)
    assert count == 1 and unguarded != kernel.source
    assert len(cubin(kernel.source, "sm_90")) < 1.5 * len(cubin(unguarded, "sm_90"))


def test_float_kernels_compute_nothing_in_double():
    """A literal or a function of the wrong type would cost most of the speed, silently."""
    plan = heads.head_logsumexp.plan(cf.spec((64, 64)), cf.spec((4096, 64)), cf.spec(4096))
    step = plan.steps[-1]
    program = Program(step, plan.scheduled.storage)
    text = emit.emit(program, default_config(program, Access(4))).source
    struct = re.sub(r"double \w+;|static_cast<float>\(\w+\)", "", text[text.index("struct Program") :])
    assert "double" not in struct
    assert not re.search(r"\d\.\d+(?![0-9f])", struct), "a literal without its suffix is a double"


def test_a_compiler_error_is_told_with_its_log():
    with pytest.raises(cf.EngineError, match="undefined"):
        cubin('extern "C" __global__ void k() { undefined_name(); }', "sm_90")


# Loading ------------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Stands for CuPy's CompileException."""


class DriverError(RuntimeError):
    """Stands for CuPy's CUDADriverError."""


class FakeCupy:
    """The part of CuPy that compiles and loads, for a GPU of some compute capability.

    `error` is that of compiling; a binary that `fails` is not loaded. What is compiled is listed with its options.
    """

    def __init__(self, fails=lambda binary: False, capability="35"):
        self.error = None
        self.compiled, self.attributes, self.entered = [], [], []
        fake = self

        class Module:
            def load(self, binary):
                if fails(binary):
                    raise DriverError("CUDA_ERROR_INVALID_IMAGE")
                self.binary = binary

            def get_function(self, name):
                return SimpleNamespace(ptr=7, name=name, binary=self.binary)

        class Device:
            compute_capability = capability

            def __init__(self, number):
                self.number = number

            def __enter__(self):
                fake.entered.append(self.number)

            def __exit__(self, *error):
                pass

        self.cuda = SimpleNamespace(
            nvrtc=SimpleNamespace(
                NVRTCError=Refusal,
                getVersion=lambda: (13, 0),
                createProgram=lambda code, *_: code,
                compileProgram=self.compile,
                getCUBIN=lambda program: b"binary of " + program.encode()[-9:],
                destroyProgram=lambda program: None,
            ),
            driver=SimpleNamespace(CUDADriverError=DriverError, funcSetAttribute=lambda *a: self.attributes.append(a)),
            compiler=SimpleNamespace(CompileException=Refusal, compile_using_nvrtc=self.compile_using_nvrtc),
            function=SimpleNamespace(Module=Module),
            Device=Device,
        )

    def compile(self, program, options):
        self.compiled.append(options)
        if self.error is not None:
            raise self.error

    def compile_using_nvrtc(self, code, options, cache_in_memory):
        assert cache_in_memory
        self.compile(code, options)
        return b"binary of " + code.encode()[-9:], None


def kernel(text):
    return emit.Kernel("row_lanes_kernel", f"// {text}", (), Config("row_lanes", 128, 1, 1))


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Begin processes, each with a CuPy of its own, over one cache on disk."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))

    def begin(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        for name in ("_functions", "_binaries", "_kernel_locks"):
            monkeypatch.setattr(compiling, name, {})
        monkeypatch.setattr(compiling, "_without_cache", False)
        monkeypatch.setattr(compiling, "_untold", None)
        return cupy

    compiling._threads.cache_clear()
    yield SimpleNamespace(begin=begin, folder=tmp_path / "cache")
    compiling._threads().shutdown()
    compiling._threads.cache_clear()


def test_a_kernel_is_compiled_once_and_its_binary_kept(process):
    first = process.begin(FakeCupy())
    found = [load(kernel(text), 0) for text in "aab"]
    assert found[0] is found[1] and [f.binary for f in found] == [
        b"binary of // a",
        b"binary of // a",
        b"binary of // b",
    ]
    assert first.compiled == [compiling.OPTIONS] * 2 and "-ftz=true" in compiling.OPTIONS
    assert [path.suffix for path in process.folder.iterdir()] == [".cubin"] * 2, "no part is left"
    second = process.begin(FakeCupy())
    assert [load(kernel(text), 0).binary for text in "ab"] == [b"binary of // a", b"binary of // b"]
    assert not second.compiled
    another_gpu = process.begin(FakeCupy(capability="90"))
    assert load(kernel("a"), 0).binary == b"binary of // a" and len(another_gpu.compiled) == 1


def test_a_binary_for_a_named_architecture_is_kept(process):
    (tiles, _) = plain_kernels(64)
    first = process.begin(FakeCupy())
    function = load(tiles, 0)
    second = process.begin(FakeCupy())
    assert load(tiles, 0).binary == function.binary
    assert first.compiled == [(*compiling.OPTIONS, "-arch=sm_90a")] and not second.compiled
    assert first.attributes == second.attributes == [(7, 8, tiles.shared)]


def test_kernels_compiled_ahead_are_only_loaded(process):
    cupy = process.begin(FakeCupy())
    wait(compiling.compile_ahead([kernel("a"), kernel("b"), kernel("a")], 3))
    assert len(cupy.compiled) == 2 and cupy.entered == [3, 3] and not compiling._functions
    assert [load(kernel(text), 3).binary for text in "ab"] == [b"binary of // a", b"binary of // b"]
    wait(compiling.compile_ahead([kernel("a"), kernel("b")], 3))
    assert len(cupy.compiled) == 2


def test_few_kernels_that_are_not_loaded_are_kept(process, monkeypatch):
    monkeypatch.setattr(compiling, "_MOST_BINARIES", 2)
    cupy = process.begin(FakeCupy())
    wait(compiling.compile_ahead([kernel(text) for text in "abcd"], 0))
    assert len(compiling._binaries) == 2
    assert [load(kernel(text), 0).binary[-1:] for text in "abcd"] == [b"a", b"b", b"c", b"d"]
    assert len(cupy.compiled) == 4, "the others are read from the disk"


def test_a_kernel_being_compiled_ahead_is_waited_for(process):
    cupy, begun, go_on = process.begin(FakeCupy()), threading.Event(), threading.Event()
    compile_at_once = cupy.compile_using_nvrtc

    def compile_slowly(*arguments, **options):
        begun.set()
        assert go_on.wait(10)
        return compile_at_once(*arguments, **options)

    cupy.cuda.compiler.compile_using_nvrtc = compile_slowly
    compiling.compile_ahead([kernel("a")], 0)
    assert begun.wait(10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(load, kernel("a"), 0)
        go_on.set()
        assert waiting.result(10).binary == b"binary of // a"
    assert len(cupy.compiled) == 1


@pytest.mark.parametrize(("cluster", "places"), [(8, 0), (16, 1), (16, 0)])
def test_a_large_cluster_needs_a_place_on_the_gpu(process, monkeypatch, cluster, places):
    """Those of up to 8 blocks run on every GPU with clusters: nobody asks."""
    process.begin(FakeCupy())
    monkeypatch.setattr(compiling, "most_clusters", lambda *asked: places if asked == (7, 16, 256, 64) else None)
    found = replace(kernel("a"), cluster=cluster, shared=64, config=Config("row_shared", 256, 1, 4, cluster=cluster))
    if cluster == 16 and not places:
        with pytest.raises(ClusterError, match="no place for a cluster of 16 blocks"):
            load(found, 0)
    else:
        assert load(found, 0).binary == b"binary of // a"


def test_python_ends_without_what_nobody_waits_for(process, monkeypatch):
    """Its end waits for all threads: those that have begun end, no other one begins."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cupy, both, go_on = process.begin(FakeCupy()), threading.Barrier(3, timeout=10), threading.Event()

    def compile_slowly(code, options, cache_in_memory):
        both.wait()
        assert go_on.wait(10)
        return cupy.compile(code, options) or b"binary", None

    cupy.cuda.compiler.compile_using_nvrtc = compile_slowly
    begun = compiling.compile_ahead([kernel(text) for text in "abcde"], 0)
    both.wait()
    compiling._threads().shutdown(wait=False)  # as at the end of Python
    go_on.set()
    wait(begun)
    assert len(begun) == 5 and len(cupy.compiled) == 2


def test_what_fails_ahead_is_told_by_load(process):
    cupy = process.begin(FakeCupy())
    cupy.error = Refusal("error: identifier is undefined")
    wait(compiling.compile_ahead([kernel("a")], 0))
    with pytest.raises(cf.EngineError, match="identifier is undefined"):
        load(kernel("a"), 0)
    cupy.error = None
    assert load(kernel("a"), 0).binary == b"binary of // a"


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:40], lambda b: b[:-1] + b"?", lambda b: bytes(len(b))])
def test_a_damaged_binary_is_compiled_anew(process, damage):
    process.begin(FakeCupy())
    load(kernel("a"), 0)
    (path,) = process.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    again = process.begin(FakeCupy())
    load(kernel("a"), 0)
    assert len(again.compiled) == 1 and path.read_bytes() == whole


@pytest.mark.parametrize("ahead", [False, True])
def test_a_binary_that_no_gpu_loads_is_compiled_anew(process, ahead):
    process.begin(FakeCupy())
    load(kernel("a"), 0)
    failures = [True]
    again = process.begin(FakeCupy(lambda binary: failures and failures.pop()))
    if ahead:
        wait(compiling.compile_ahead([kernel("a")], 0))
        assert not again.compiled
    load(kernel("a"), 0)
    assert len(again.compiled) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_where_nothing_can_be_kept_binaries_are_compiled_in_every_process(process, ahead):
    process.folder.write_text("a file")
    cupy = process.begin(FakeCupy())
    with pytest.warns(RuntimeWarning, match="CUPY_CACHE_DIR") as caught:
        if ahead:
            wait(compiling.compile_ahead([kernel("a"), kernel("b")], 0))
        assert [load(kernel(text), 0).binary for text in "aab"] == [b"binary of // " + t for t in (b"a", b"a", b"b")]
    assert len(caught) == 1 and len(cupy.compiled) == 2


def test_kernels_compile_in_as_many_threads_as_the_process_has_cpus(process, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    compiling._threads.cache_clear()
    cupy, both, most = process.begin(FakeCupy()), threading.Barrier(2, timeout=10), []

    def compile_beside(program, options):
        most.append(threading.active_count() - before)
        both.wait()

    cupy.compile, before = compile_beside, threading.active_count()
    cupy.cuda.nvrtc.compileProgram = compile_beside
    wait(compiling.compile_ahead([kernel(text) for text in "abcdef"], 0))
    assert len(most) == 6 and max(most) == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_warning_that_is_an_error_is_raised_once_and_not_lost_in_a_thread(process, ahead):
    process.folder.write_text("a file")
    process.begin(FakeCupy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if ahead:
            wait(compiling.compile_ahead([kernel("a")], 0))
        with pytest.raises(RuntimeWarning, match="CUPY_CACHE_DIR"):
            load(kernel("a"), 0)
        assert load(kernel("a"), 0).binary == b"binary of // a"


def test_a_full_disk_keeps_no_part_of_a_binary(process, monkeypatch):
    def fail(*names):
        raise OSError(errno.ENOSPC, "No space left on device")

    process.begin(FakeCupy())
    monkeypatch.setattr(os, "replace", fail)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert load(kernel("a"), 0).binary == b"binary of // a"
    assert not list(process.folder.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        Refusal("error: identifier is undefined"),
        Refusal("invalid value for --gpu-architecture"),
        RuntimeError("CuPy failed to load libnvrtc.so.12"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_an_error_that_leaves_the_library_usable(process, error):
    cupy = process.begin(FakeCupy())
    cupy.error = error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(cf.EngineError) as caught:
                load(kernel("a"), 3)
    message = str(caught.value)
    for words in ("row_lanes_kernel", "GPU 3 (compute capability 3.5", "tested from 7.5 on", "python -m cupyfuse info"):
        assert words in message
    assert str(error) in message
    cupy.error = None
    assert load(kernel("a"), 3).binary == b"binary of // a"


def test_a_gpu_that_loads_no_binary_is_an_error(process):
    cupy = process.begin(FakeCupy(lambda binary: True))
    for compiled in (1, 2):
        with pytest.raises(cf.EngineError, match="CUDA_ERROR_INVALID_IMAGE"):
            load(kernel("a"), 0)
        assert len(cupy.compiled) == compiled


def test_a_kernel_that_fails_in_one_thread_fails_in_none_after_it(process):
    """The lock is given back, and nothing is left of the failure."""

    def attempt(number):
        try:
            return load(kernel(str(number)), 0).name
        except cf.EngineError:
            return "failed"

    cupy = process.begin(FakeCupy())
    cupy.error = Refusal("no")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(attempt, range(32))) == ["failed"] * 32
        cupy.error = None
        assert list(pool.map(attempt, range(32))) == ["row_lanes_kernel"] * 32


def test_a_function_whose_kernel_failed_works_once_it_compiles(monkeypatch):
    """Nothing of the failed call is kept: not its plan, not half of its results."""
    x, out = np.ones((3, 70), np.float32), np.full((3, 70), np.nan, np.float32)
    soft = cf.fuse(lambda x: cf.softmax(x * 2, axis=1))

    def refuse(kernel):
        raise cf.EngineError("no such GPU")

    with HOST.active():
        device_x, device_out = HOST.array(x), HOST.array(out)
        with monkeypatch.context() as patch:
            patch.setattr(HOST.runtime, "function", refuse)
            for _ in range(2):
                with pytest.raises(cf.EngineError, match="no such GPU"):
                    soft(device_x, out=device_out)
        assert np.isnan(HOST.host(device_out)).all()
        soft(device_x, out=device_out)
        np.testing.assert_allclose(HOST.host(device_out), soft(x), rtol=1e-6)


# What kernels take ----------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("program", ["softmax, backward from its operand", "layer norm, backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("cols", [8192])
def test_programs_with_many_values_an_element_spill_no_registers(program, dtype, cols):
    """Rows are held as they were loaded: five values an element in registers made these up to four times as slow."""
    registers = docs_script("registers")
    function, matrices, vectors = registers.PROGRAMS[program]
    plan = function.plan(*[cf.spec((4096, cols), dtype)] * matrices, *[cf.spec(cols, dtype)] * vectors)
    kernels = [k for s in plan.steps for k in kernels_of(s, plan.scheduled.storage, clusters=True)]
    assert all(registers.resources_of(cubin(k.source, "sm_90")).stack <= 16 for k in kernels)


@pytest.mark.parametrize(
    "program", ["BatchNorm and softmax", "bias, BatchNorm and softmax", "BatchNorm and softmax, backward"]
)
@pytest.mark.parametrize(("rows", "cols"), [(1024, 8192), (1024, 4096), (16384, 8192), (16384, 2048)])
def test_several_arrays_of_columns_leave_registers_to_compute_with(program, rows, cols):
    registers = docs_script("registers")
    function, matrices, vectors = registers.PROGRAMS[program]
    for dtype in ("float32", "bfloat16"):
        plan = function.plan(*[cf.spec((rows, cols), dtype)] * matrices, *[cf.spec(cols, dtype)] * vectors)
        (kernel,) = kernels_of(plan.steps[-1], plan.scheduled.storage, clusters=True)
        assert kernel.config.packed
        assert registers.resources_of(cubin(kernel.source, "sm_90")).stack <= 64, dtype


def test_what_a_kernel_takes_is_read_from_its_binary():
    """Registers, stack and shared memory: of a kernel with little of each, and of one with a large local array."""
    resources_of = docs_script("registers").resources_of
    head = 'extern "C" __global__ void kernel(float* p) {'
    shared = "__shared__ float row[256]; row[threadIdx.x] = p[threadIdx.x]; __syncthreads(); p[0] = row[5]; }"
    local = "float held[100]; for (int i = 0; i < 100; ++i) held[int(p[i])] = p[i + 100]; p[0] = held[int(p[1])]; }"
    for architecture in ("sm_80", "sm_90", "sm_120"):
        first = resources_of(cubin(head + shared, architecture))
        second = resources_of(cubin(head + local, architecture))
        assert first.shared in (1024, 2048) and first.stack == 0 and 4 <= first.registers <= 32  # 1 KiB is the system's
        assert second.shared in (0, 1024) and second.stack >= 400 and second.registers <= 255
