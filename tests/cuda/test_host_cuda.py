"""The machinery that runs kernels on the CPU: it computes what a GPU would, and reports what a GPU would suffer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from host_cuda.library import CompileError, HostCudaError, sanitizer_environment
from host_trial import THREADS, run
from kernel_cases import CASES
from support import DAYS, HELPERS, ROOT

from cupyfuse.cuda.structs import divisor


def all_the_same(results: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    return results[0]


# What kernels may do -----------------------------------------------------------------------------------------------


def test_threads_blocks_and_barriers() -> None:
    """A reversal through shared memory: every thread reads what another one has written."""
    body = """
    SHARED_BYTES(memory, 64 * sizeof(float));
    float* shared = reinterpret_cast<float*>(memory);
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    shared[threadIdx.x] = p.x[i];
    __syncthreads();
    p.x[i] = shared[63 - threadIdx.x] + 1000 * gridDim.x;"""
    expected = np.arange(256.0).reshape(4, 64)[:, ::-1].ravel() + 4000
    np.testing.assert_array_equal(all_the_same(run(body, grid=(4, 1, 1))), expected)


def test_dynamic_shared_memory_is_a_macro_too() -> None:
    body = "SHARED_DYNAMIC(memory); p.x[threadIdx.x] = memory != nullptr;"
    assert all_the_same(run(body))[:64].all()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("__shfl_xor_sync(0xffffffffu, p.x[i], 5)", lambda i: i ^ 5),
        ("__shfl_sync(0xffffffffu, p.x[i], 3)", lambda i: i // 32 * 32 + 3),
        ("__shfl_down_sync(0xffffffffu, p.x[i], 4)", lambda i: np.where(i % 32 + 4 < 32, i + 4, i)),
        ("__shfl_up_sync(0xffffffffu, p.x[i], 4)", lambda i: np.where(i % 32 >= 4, i - 4, i)),
        ("__ballot_sync(0xffffffffu, i % 32 == 3 || i == 33)", lambda i: np.where(i < 32, 8, 10)),
        ("__any_sync(0xffffffffu, i == 40)", lambda i: i >= 32),
        ("__all_sync(0xffffffffu, i < 40)", lambda i: i < 32),
        ("i % 32 < 16 ? __shfl_xor_sync(0x0000ffffu, p.x[i], 1) : p.x[i]", lambda i: np.where(i % 32 < 16, i ^ 1, i)),
    ],
)
def test_warps(body: str, expected: Any) -> None:
    text = f"const int i = threadIdx.x; const float y = {body};\n__syncthreads(); p.x[i] = y;"
    np.testing.assert_array_equal(all_the_same(run(text))[:64], expected(np.arange(64)))


def test_atomics_and_the_last_block() -> None:
    """Blocks add to one place, and the one that comes last doubles what all have added."""
    body = """
    unsigned* done = reinterpret_cast<unsigned*>(p.x + 1);
    atomicAdd(p.x, 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(done, gridDim.x - 1) == gridDim.x - 1) { p.x[0] *= 2; }"""
    result = all_the_same(run(body, grid=(5, 1, 1), values=np.zeros(4, np.float32)))
    assert result[0] == 2 * 5 * THREADS and result[1] == 0


def test_sixteen_bit_floats_round_to_nearest_even() -> None:
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2**-25, 1.1 * 2**-25, -0.0, 70000.0], np.float32)
    body = '\n#include "types.cuh"\nif (threadIdx.x < 8) { p.x[threadIdx.x] = widen(narrow<f16>(p.x[threadIdx.x])); }'
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(all_the_same(run(body, values=values)), expected)


def test_rows_come_again_beyond_32_bits() -> None:
    rows, (block, times, inner) = [5, 2**33 + 5, 2**40 + 12345, 3 * 2**32 - 1], (2**32 + 6, 3, 7)
    numbers = ", ".join(f"{row}ll" for row in rows)
    divisors = ", ".join(_divisor(n) for n in (block, times, inner))
    body = f"""
#include "types.cuh"
const i64 rows[4] = {{{numbers}}};
if (threadIdx.x < 4) {{ p.x[threadIdx.x] = repeated_row(rows[threadIdx.x], {divisors}, {inner}, 1, 0); }}"""
    found = all_the_same(run(body, values=np.zeros(4, np.float32)))
    np.testing.assert_array_equal(found, [row // block * inner + row // times % inner for row in rows])


def _divisor(number: int) -> str:
    value, inverse = divisor(number).members
    return f"Divisor{{{value}ll, {inverse}ull}}"


def test_quotients_by_multiplication() -> None:
    """Divisors of all sizes below 2^31, and the numbers around their multiples."""
    most = 2**31 - 1
    divisors = [*range(1, 57), 641, 10**6 + 3, 2**30 - 1, 2**30, 2**30 + 1, most - 1, most]
    numbers = [[0, 1, d - 1, d, min(2 * d, most), most // d * d - 1, most // d * d, most] for d in divisors]
    body = f"""
#include "types.cuh"
const Divisor divisors[] = {{{", ".join(map(_divisor, divisors))}}};
const u32 numbers[][8] = {{{", ".join("{" + ", ".join(map(str, row)) + "}" for row in numbers)}}};
if (threadIdx.x < {len(divisors)}) {{
    const Divisor& own = divisors[threadIdx.x];
    int right = 0;
    for (const u32 number : numbers[threadIdx.x]) {{ right += own.quotient(number) == number / own.value; }}
    p.x[threadIdx.x] = right;
}}"""
    found = all_the_same(run(body, grid=(1, 1, 1), values=np.zeros(len(divisors), np.float32)))
    np.testing.assert_array_equal(found, 8)


# What Hopper adds --------------------------------------------------------------------------------------------------

HOPPER = '#include "tensor_cores.cuh"\nSHARED_DYNAMIC(s); (void)s;\n'
PAIR: dict[str, Any] = {"cluster": 2, "shared": 4096}
# A matrix of 5 lines of 70 elements in x, whose bits are 0, 1, 2, ...
MATRIX = """
const u64 map[7] = {reinterpret_cast<u64>(p.x), 70, 5, 144, 64, 8, 2};
TensorMap matrix;
memcpy(matrix.words, map, sizeof map);"""


def test_a_box_is_swizzled_and_ends_in_zeros() -> None:
    body = f"""
    {HOPPER}{MATRIX}
    if (threadIdx.x == 0) {{ barrier_init(2048, 1); barrier_arrive_expect(2048, 1024);
                             tensor_copy(1024, matrix, 64, 1, 2048); }}
    __syncthreads();
    barrier_wait(2048, 0);
    for (int r = threadIdx.x; r < 8; r += 64) {{
        for (int c = 0; c < 8; ++c) {{
            p.x[200 + r * 7 + c % 7] = *reinterpret_cast<unsigned short*>(s + 1024 + r * 128 + (r * 16) + c * 2);
        }}
    }}"""
    bits = np.arange(5 * 72, dtype=np.uint16)
    values = np.zeros(256, np.float32)
    values.view(np.uint16)[: bits.size] = bits
    for result in run(body, values=values, shared=4096):
        found = result[200:256].reshape(8, 7)
        expected = np.zeros((8, 8))
        expected[:4, :6] = bits.reshape(5, 72)[1:, 64:70]
        np.testing.assert_array_equal(found[:, 1:6], expected[:, 1:6])
        np.testing.assert_array_equal(found[:, 0], expected[:, 7])


def test_a_box_for_both_blocks_of_a_cluster() -> None:
    """Block 1 copies, both wait at their own barriers, and block 0 waits for an arrival from block 1 as well."""
    body = f"""
    {HOPPER}{MATRIX}
    if (threadIdx.x == 0) {{ barrier_init(2048, 1); barrier_init(2056, 2); barrier_arrive_expect(2048, 1024); }}
    cluster_sync();
    if (threadIdx.x == 0 && cluster_rank() == 1) {{ tensor_copy_to(1024, matrix, 0, 0, 2048, 3); }}
    barrier_wait(2048, 0);
    if (threadIdx.x == 0) {{ barrier_arrive_in(2056, 0); }}
    if (cluster_rank() == 0) {{ barrier_wait(2056, 0); }}
    if (threadIdx.x == 0) {{ p.x[250 + cluster_rank()] = *reinterpret_cast<unsigned short*>(s + 1024 + 128 + 16); }}
    cluster_sync();"""
    values = np.zeros(256, np.float32)
    values.view(np.uint16)[:360] = np.arange(360)
    for result in run(body, grid=(2, 1, 1), values=values, **PAIR):
        np.testing.assert_array_equal(result[250:252], [72, 72])


# Of 12 lines of 20 elements of 4 bytes, in boxes of 8 lines of 16.
STORED = """
const u64 map[7] = {reinterpret_cast<u64>(p.x), 20, 12, 96, 16, 8, 4};
TensorMap matrix;
memcpy(matrix.words, map, sizeof map);
for (int k = threadIdx.x; k < 128; k += 32) { reinterpret_cast<float*>(s)[k] = k; }
"""
LATE = "__syncwarp(0xffffffffu); if (threadIdx.x == 0) { s[17] = 9; }"
STORE = "__syncwarp(0xffffffffu); if (threadIdx.x == 0) { tensor_store(matrix, 8, 6, s); } stores_commit();"


def test_a_box_is_stored_when_it_is_waited_for() -> None:
    """Swizzled by its lines of 64 bytes, but for what lies beyond the matrix."""
    before = "if (threadIdx.x == 0) { p.x[0] = p.x[6 * 24 + 8]; }"
    body = f"{HOPPER}{STORED} stores_fence(); {STORE} {before} stores_wait();"
    bytes_of = 4 * np.arange(128)
    box = (bytes_of ^ (bytes_of >> 7 & 3) << 4).reshape(8, 16) // 4
    expected = np.full((12, 24), 7, np.float32)
    expected[6:12, 8:20] = box[:6, :12]
    values = np.full(12 * 24, 7, np.float32)
    result = all_the_same(run(body, threads=32, values=values, shared=512))
    np.testing.assert_array_equal(result.reshape(12, 24), expected)


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (f"if (threadIdx.x != 5) {{ stores_fence(); }} {STORE} stores_wait();", "before no fence"),
        (f"stores_fence(); {STORE} stores_wait(); stores_fence(); {LATE} {STORE} stores_wait();", "behind its fence"),
        (f"stores_fence(); {STORE} {LATE} stores_wait();", "changes while a store reads it"),
        (f"stores_fence(); {STORE}", "leaves the kernel while stores read"),
        (f"stores_fence(); {STORE.replace('s);', 's + 64);')} stores_wait();", "aligned to 128 bytes"),
    ],
)
def test_stores_of_boxes_that_are_wrong_are_reported(body: str, report: str) -> None:
    with pytest.raises(HostCudaError, match=report):
        run(f"{HOPPER}{STORED}{body}", threads=32, values=np.zeros(12 * 24, np.float32), shared=1024)


def test_products_read_their_operands_when_they_are_waited_for() -> None:
    body = f"""
    {HOPPER}
    float sum[4] = {{}};
    for (int k = threadIdx.x; k < 1024; k += 128) {{ reinterpret_cast<f16*>(s)[k] = narrow<f16>(1.0f); }}
    __syncthreads();
    products_begin(sum);
    multiply_add<f16, 0, 0>(sum, operand_at(0, 1024), operand_at(0, 1024), 0);
    products_commit();
    const float before = sum[0];
    __syncthreads();
    for (int k = threadIdx.x; k < 1024; k += 128) {{ reinterpret_cast<f16*>(s)[k] = narrow<f16>(2.0f); }}
    __syncthreads();
    products_wait(sum);
    p.x[threadIdx.x] = sum[0] + 1000 * before;"""
    for result in run(body, threads=128, shared=8192 + 1024):
        assert set(result[:16]) == {64.0}, "16 products of twos"


ASTRAY = {
    "a block that leaves": (
        "if (threadIdx.x == 0) { barrier_init(2048, 1); }\ncluster_sync();\n"
        "if (cluster_rank() == 1 && threadIdx.x == 0) { barrier_arrive_in(2048, 0); }",
        r"the shared memory of a block that has left",
    ),
    "a barrier that nobody made": ("barrier_wait(2048, 0);", r"nobody has initialised"),
    "half a cluster at its barrier": (
        "if (cluster_rank() == 0) { cluster_sync(); }",
        r"a barrier of the cluster, which thread \d+ never reaches",
    ),
    "another block than there is": (
        "if (threadIdx.x == 0) { barrier_init(2048, 1); barrier_arrive_in(2048, 2); }",
        r"a block that the cluster does not have",
    ),
    "a box that is not aligned": (
        MATRIX + "barrier_init(2048, 1); tensor_copy(512, matrix, 0, 0, 2048);",
        r"aligned to 1024",
    ),
    "products of half a warp": (
        "if (threadIdx.x % 32 < 4) {\n__shfl_xor_sync(0x0000000fu, 1.0f, 1);\n}\nproducts_fence();",
        r"an instruction of whole warps, while lane \d+ is apart",
    ),
}


@pytest.mark.parametrize("fault", ASTRAY)
def test_faults_of_clusters_are_reported(fault: str) -> None:
    body, message = ASTRAY[fault]
    with pytest.raises(HostCudaError, match=message):
        run(HOPPER + body, grid=(2, 1, 1), **PAIR)


def test_clusters_are_whole() -> None:
    with pytest.raises(HostCudaError, match="3 blocks in clusters of 2"):
        run("p.x[0] = 1;", grid=(3, 1, 1), **PAIR)


# What they may not do, and how it is told ------------------------------------------------------------------------

BROKEN = {
    "a barrier in a branch": (
        "if (threadIdx.x < 16) {\n__syncthreads();\n}",
        r"trial:5: .*thread 0 waits here at __syncthreads, which thread \d+ never reaches: it has left",
    ),
    "two barriers": (
        "if (threadIdx.x < 32) {\n__syncthreads();\n} else {\n__syncthreads();\n}",
        r"trial:5: .*thread 0 waits here at __syncthreads, thread \d+ at .*trial:7 at __syncthreads: they never meet",
    ),
    "a shuffle that a lane has left": (
        "if (threadIdx.x % 32 == 7) return;\n__shfl_xor_sync(0xffffffffu, 1.0f, 1);",
        r"trial:5: .*(names lane 7, which has left|which thread \d+ never reaches)",
    ),
    "two shuffles": (
        "if (threadIdx.x % 2) {\n__shfl_xor_sync(~0u, 1.0f, 1);\n} else {\n__shfl_xor_sync(~0u, 1.0f, 1);\n}",
        r"trial:(5|7): .*a shuffle of lanes ffffffff meets a shuffle of lanes ffffffff at .*trial:(5|7)",
    ),
    "lanes that disagree on the members": (
        "__shfl_xor_sync(threadIdx.x % 2 ? 0xffffffffu : 0x0fffffffu, 1.0f, 1);",
        r"trial:4: .*(meets a shuffle of lanes|is not among)",
    ),
    "a lane outside of the members": ("__shfl_sync(0x0000ffffu, 1.0f, 3);", r"trial:4: .*lane \d+ is not among"),
    "a shuffle from outside of the members": (
        "if (threadIdx.x < 16) __shfl_xor_sync(0x0000ffffu, 1.0f, 16);",
        r"trial:4: .*reads lane \d+, which is not among",
    ),
    "a shuffle beside a barrier": (
        "if (threadIdx.x % 32 < 16) {\n__shfl_xor_sync(0xffffffffu, 1.0f, 1);\n} else {\n__syncthreads();\n}",
        r"trial:(5|7): .*they never meet",
    ),
    "a write behind an array": ("p.x[p.n + threadIdx.x] = 1;", r"beyond what the kernel was given|outside of an array"),
    "a read behind an array": ("float y = p.x[p.n + 800]; p.x[0] = y;", r"beyond what the kernel was given"),
    "a write before an array": ("p.x[-1] = 1;", r"beyond what the kernel was given|outside of an array"),
    "a null pointer": ("float* x = p.n ? nullptr : p.x;\n*x = 1;", r"trial:5: .*null or not aligned"),
    "a vector at an odd address": ("*reinterpret_cast<uint4*>(p.x + 1) = uint4{};", r"trial:4: .*not aligned"),
    "a pair at an odd address": (
        "*reinterpret_cast<unsigned*>(reinterpret_cast<char*>(p.x) + 2) = 1;",
        r"trial:4: .*not aligned",
    ),
    "a write beyond shared memory": ("SHARED_BYTES(s, 64); s[64 + threadIdx.x % 2] = 1;", r"beyond the 64 bytes"),
    "a 32-bit offset": ("int i = 0x7fffffff - 10; i += (int)threadIdx.x; p.x[0] = i;", r"trial:4: .*that overflows"),
    "an index out of an array": ("int a[4]; a[threadIdx.x / 4] = 1; p.x[0] = a[1];", r"trial:4: .*out of the bounds"),
    "a wide shift": ("p.x[0] = 1u << (threadIdx.x + 1);", r"trial:4: .*shift"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_faults_are_reported(fault: str) -> None:
    body, message = BROKEN[fault]
    with pytest.raises(HostCudaError, match=message):
        run(body)
    all_the_same(run("p.x[threadIdx.x] += 1;"))  # and the next kernel runs


def test_a_forgotten_barrier_is_seen() -> None:
    """Warps read what others have not written yet, in some order of the threads: NaN, as shared memory is at first."""
    body = """
    SHARED_BYTES(memory, 64 * sizeof(float));
    float* shared = reinterpret_cast<float*>(memory);
    shared[threadIdx.x] = p.x[threadIdx.x];
    p.x[threadIdx.x] = shared[63 - threadIdx.x];"""
    assert any(np.isnan(result).any() for result in run(body))


def test_a_reused_buffer_without_a_barrier_is_seen() -> None:
    """A warp that runs ahead writes the second value before others have read the first one."""
    body = """
    SHARED_BYTES(memory, 64 * sizeof(float));
    float* shared = reinterpret_cast<float*>(memory);
    shared[threadIdx.x] = 1;
    __syncthreads();
    const float first = shared[63 - threadIdx.x];
    shared[threadIdx.x] = 2;
    __syncthreads();
    p.x[threadIdx.x] = first;"""
    assert any((result[:64] != 1).any() for result in run(body))


def test_blocks_come_in_any_order() -> None:
    results = run("if (threadIdx.x == 0) p.x[0] = blockIdx.x;", grid=(8, 1, 1))
    assert len({float(r[0]) for r in results}) > 1


def test_what_does_not_compile_is_told_with_its_line() -> None:
    with pytest.raises(CompileError, match=r"trial:4:.*undefined_name"):
        run("undefined_name();")


# With sanitizers ---------------------------------------------------------------------------------------------------


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, kernels compiled with AddressSanitizer."""
    environment = {
        **os.environ,
        **sanitizer_environment(),
        "CUPYFUSE_ORDERS": "1",
        "CUPYFUSE_ALL_TESTS": "1",  # whatever the day, the cases that are asked for
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


STRAY = """
import os, sys
from host_trial import kernel, run
from support import HOST
bodies = [f"float y = p.x[{index}];\\np.x[0] = y;" for index in sys.argv[1:]]
for body in bodies:
    HOST.runtime.library.want(kernel(body))
HOST.runtime.library.compile()
for body in bodies:
    if os.fork() == 0:
        run(body)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.rotates
def test_address_sanitizer_names_the_line() -> None:
    """Of the element behind an array, of the one before it, and of one far behind it."""
    done = sanitized("-c", STRAY, "p.n", "-1", "p.n + 100")
    assert done.stdout.split() == ["99"] * 3, done.stderr
    assert done.stderr.count("ERROR: AddressSanitizer: use-after-poison") == 3
    reports = done.stderr.split("ERROR: AddressSanitizer: use-after-poison")[1:]
    assert all(re.search(r"emitted trial:4", report) for report in reports)


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(DAYS))
def test_the_kernels_run_clean_under_address_sanitizer(part: int) -> None:
    """A seventh of the cases, and all other tests that run kernels beside them."""
    file = "tests/cuda/test_kernels.py"
    others = [f"--deselect={file}::test_kernels[host-{c.name}]" for k, c in enumerate(CASES) if k % DAYS != part]
    done = sanitized("-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "host", *others)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) >= len(CASES[part::DAYS]), done.stdout
