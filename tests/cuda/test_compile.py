"""Every kernel that the planner can emit for the heads compiles for every architecture, without a GPU; and what becomes
of kernels that do not compile, do not load, or find no cache, with a CuPy that does as it is told."""

from __future__ import annotations

import re
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
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
from cupyfuse.cuda.configure import Access, Config, default_config
from cupyfuse.cuda.fingerprint import MOST_MATRICES, fingerprint_kernel
from cupyfuse.cuda.program import Program
from cupyfuse.cuda.scan import scan_kernel
from cupyfuse.cuda.sources import kernels_of
from cupyfuse.ir.graph import SCANS
from cupyfuse.plan.schedule.products import TILE_WIDTHS
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [2000, 4000])
def test_all_reductions_together_compile(dtype, rows):
    """Down the columns their accumulators, one for each warp and column, fit into a block's shared memory."""
    plan = all_reductions(0).plan(cf.spec((rows, 40), dtype))
    kernels = [k for step in plan.steps for k in kernels_of(step, plan.scheduled.storage)]
    assert any(k.config.template == "column_stats" for k in kernels)
    assert all(compiles(k.source, ARCHITECTURES[0]) for k in kernels)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_120"])
def test_kernels_of_shared_rows_compile(architecture):
    for dtype in DTYPES:
        plan = cf.fuse(lambda x: cf.logsumexp(x, axis=1)).plan(cf.spec((2, 40000), dtype))
        kernels = [k for step in plan.steps for k in kernels_of(step, plan.scheduled.storage)]
        assert dtype == "float64" or [k.name for k in kernels] == ["row_shares_kernel", "row_merge_kernel"]
        assert all(compiles(k.source, architecture) for k in kernels)


WITH_POSITIONS = [(3000, 100), (3000, 5000), (2, 40000), (2, 1 << 32)]


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_of_the_split_compile(architecture):
    _, repair = plain_kernels(64)
    for kernel in share([split.split_rows_kernel(), split.split_columns_kernel(), repair], architecture):
        assert compiles(kernel.source, architecture)


def test_the_repair_has_each_of_its_loops_once():
    """For marked rows of either operand, and for whole groups and the last: as copies they take a second to compile."""
    _, repair = plain_kernels(64)
    assert len(cubin(repair.source, "sm_90")) < 64 << 10


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


def test_the_largest_fingerprint_compiles():
    assert compiles(fingerprint_kernel(MOST_MATRICES).source, ARCHITECTURES[0])


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
    """The part of CuPy that compiles and loads.

    `disk` and `memory` are the errors of compiling through the cache on disk, and of compiling without it.
    """

    def __init__(self):
        self.disk = self.memory = None
        self.compiled = []
        compiler = types.SimpleNamespace(CompileException=Refusal, compile_using_nvrtc=self.compile_using_nvrtc)
        device = types.SimpleNamespace(compute_capability="35")
        self.cuda = types.SimpleNamespace(
            compiler=compiler,
            driver=types.SimpleNamespace(CUDADriverError=DriverError),
            function=types.SimpleNamespace(Module=self.Module),
            Device=lambda number: device,
        )

    def RawModule(self, code, options):
        self.compiled.append(("disk", options))
        if self.disk is not None:
            raise self.disk
        return types.SimpleNamespace(get_function=lambda name: types.SimpleNamespace(kernel=f"{name} from disk"))

    def compile_using_nvrtc(self, code, options, cache_in_memory):
        assert cache_in_memory
        self.compiled.append(("memory", options))
        if self.memory is not None:
            raise self.memory
        return b"binary", None

    class Module:
        def load(self, binary):
            assert binary == b"binary"

        def get_function(self, name):
            return f"{name} from memory"


def kernel(text):
    return emit.Kernel("row_lanes_kernel", f"// {text}", (), Config("row_lanes", 128, 1, 1))


@pytest.fixture
def fake_cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(compiling, "_functions", {})
    monkeypatch.setattr(compiling, "_without_cache", False)
    return fake


def test_a_kernel_is_compiled_once(fake_cupy):
    assert [load(kernel(text), 0) for text in "aab"] == ["row_lanes_kernel from disk"] * 3
    assert fake_cupy.compiled == [("disk", compiling.OPTIONS)] * 2


@pytest.mark.parametrize(
    "error",
    [PermissionError(13, "Permission denied", "/cache"), OSError(28, "No space left on device"), DriverError("image")],
)
def test_a_cache_that_cannot_be_used_is_done_without(fake_cupy, error):
    fake_cupy.disk = error
    with pytest.warns(RuntimeWarning, match="CUPY_CACHE_DIR") as caught:
        assert [load(kernel(text), 0) for text in "aab"] == ["row_lanes_kernel from memory"] * 3
    assert len(caught) == 1 and str(error) in str(caught[0].message)
    # Subnormal numbers are treated as CuPy treats them on its way through the cache; the disk is not asked again.
    memory = ("memory", (*compiling.OPTIONS, "-ftz=true"))
    assert fake_cupy.compiled == [("disk", compiling.OPTIONS), memory, memory]


@pytest.mark.parametrize(
    ("disk", "memory"),
    [
        (Refusal("error: identifier is undefined"), None),
        (Refusal("invalid value for --gpu-architecture"), None),
        (DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU"), DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")),
        (PermissionError("cache"), Refusal("error: identifier is undefined")),
        (RuntimeError("CuPy failed to load libnvrtc.so.12"), None),
    ],
)
def test_a_kernel_that_cannot_be_had_is_an_error_that_leaves_the_library_usable(fake_cupy, disk, memory):
    fake_cupy.disk, fake_cupy.memory = disk, memory
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(cf.EngineError) as caught:
                load(kernel("a"), 3)
    message = str(caught.value)
    for words in ("row_lanes_kernel", "GPU 3 (compute capability 3.5", "tested from 7.5 on", "python -m cupyfuse info"):
        assert words in message
    assert str(memory or disk) in message
    fake_cupy.disk = None
    assert load(kernel("a"), 3) == "row_lanes_kernel from disk"


def test_a_kernel_that_fails_in_one_thread_fails_in_none_after_it(fake_cupy):
    """The lock is given back, and nothing is left of the failure."""

    def attempt(number):
        try:
            return load(kernel(str(number)), 0)
        except cf.EngineError:
            return "failed"

    fake_cupy.disk = Refusal("no")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(attempt, range(32))) == ["failed"] * 32
        fake_cupy.disk = None
        assert list(pool.map(attempt, range(32))) == ["row_lanes_kernel from disk"] * 32


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


# Binaries that we keep ourselves ------------------------------------------------------------------------------------


class OwnCupy:
    """CuPy as far as a kernel for a named architecture needs it."""

    def __init__(self, fails=lambda binary: False):
        self.compiled = []
        self.attributes = []

        class Module:
            def load(self, binary):
                if fails(binary):
                    raise DriverError("CUDA_ERROR_INVALID_IMAGE")
                self.binary = binary

            def get_function(self, name):
                return SimpleNamespace(ptr=7, name=name, binary=self.binary)

        nvrtc = SimpleNamespace(
            NVRTCError=Refusal,
            getVersion=lambda: (13, 0),
            createProgram=lambda code, *_: code,
            compileProgram=lambda program, options: self.compiled.append(options),
            getCUBIN=lambda program: b"binary of " + program.encode()[-9:],
            destroyProgram=lambda program: None,
        )
        driver = SimpleNamespace(CUDADriverError=DriverError, funcSetAttribute=lambda *a: self.attributes.append(a))
        compiler = SimpleNamespace(CompileException=Refusal)
        function = SimpleNamespace(Module=Module)
        self.cuda = SimpleNamespace(nvrtc=nvrtc, driver=driver, compiler=compiler, function=function)


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "_without_cache", False)

    def loaded(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(compiling, "_functions", {})
        return load(plain_kernels(64)[0], 0)

    return SimpleNamespace(loaded=loaded, folder=tmp_path / "cache")


def test_a_binary_for_a_named_architecture_is_kept(own_cache):
    first, second = OwnCupy(), OwnCupy()
    function = own_cache.loaded(first)
    assert own_cache.loaded(second).binary == function.binary
    assert first.compiled == [(*compiling.OPTIONS, "-arch=sm_90a", "-ftz=true")] and not second.compiled
    assert first.attributes == second.attributes == [(7, 8, plain_kernels(64)[0].shared)]
    assert [path.suffix for path in own_cache.folder.iterdir()] == [".cubin"], "no part is left"


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:40], lambda b: b[:-1] + b"?", lambda b: bytes(len(b))])
def test_a_damaged_binary_is_compiled_anew(own_cache, damage):
    own_cache.loaded(OwnCupy())
    (path,) = own_cache.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    again = OwnCupy()
    own_cache.loaded(again)
    assert len(again.compiled) == 1 and path.read_bytes() == whole


def test_a_binary_that_no_gpu_loads_is_compiled_anew(own_cache):
    own_cache.loaded(OwnCupy())
    failures = [True]
    again = OwnCupy(lambda binary: failures and failures.pop())
    own_cache.loaded(again)
    assert len(again.compiled) == 1


def test_where_nothing_can_be_kept_binaries_are_compiled_in_every_process(own_cache):
    own_cache.folder.write_text("a file")
    cupy = OwnCupy()
    with pytest.warns(RuntimeWarning, match="CUPY_CACHE_DIR"):
        own_cache.loaded(cupy)
    assert len(cupy.compiled) == 1


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
