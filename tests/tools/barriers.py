"""Mutants that take out one barrier each: all of those in the kernels, found by their names."""

from __future__ import annotations

import re
from pathlib import Path

from mutant import KERNELS, Mutant
from mutants import FINGERPRINT, HELD_COLUMNS

ROOT = Path(__file__).resolve().parents[2]

_BARRIER = re.compile(
    r"__syncthreads\(\);|__syncwarp\([^()]*\);|barrier_(?:wait|arrive)\((?:ring|messages|barrier\()[^;]*\);"
    r"|(?<!\w)(?:team\.block\.)?sync\(\);|named_sync\(1 \+ number[^;]*;"
    r"|cluster_(?:sync|wait)\(\);|hand_back<Shape>\(read\);|products_wait[^;]*;"
)
_SPLIT = ("tests/cuda/test_split.py", "tests/cuda/test_rounded.py")
_PRODUCTS = ("tests/cuda/test_split.py", "-k", "host and (products_are_float32 or several)")
_FUSED = (
    "tests/cuda/test_fused_gemm.py",
    "-k",
    "host and (every_order or rows_that_begin or every_size or (more_tiles and ((two and 256by2) or 128by1)))",
)
_ROWS = ("tests/cuda/test_rows.py", "-k", "row_shared and (normalised or softmax)")
# The tests that run the barriers of a file.
TESTS = {
    "kernels_cu/cluster_team.cuh": _ROWS,
    "kernels_cu/row_shared.cu": (
        "tests/cuda/test_rows.py",
        HELD_COLUMNS,
        "-k",
        "(one_after_the_other and softmax) or (share and affine_softmax)",
    ),
    "kernels_cu/scan.cu": ("tests/cuda/test_scan.py", "-k", "host and totals and shape8"),
    "kernels_cu/column_stats.cu": (
        KERNELS,
        "-k",
        "host and (column_reductions-2x3-float32 or column_reductions-600x5-float32)",
    ),
    "kernels_cu/column_merge.cuh": (KERNELS, "-k", "host and column_reductions-600x5-float32"),
    "kernels_cu/row_columns.cu": (
        "tests/cuda/test_summed_rows.py",
        "-k",
        "one_launch and norm_gradients and 67x64 and (64by16-4 or 128by64)",
    ),
    FINGERPRINT: ("tests/cuda/test_fingerprint.py", "-k", "host and stays"),
    "kernels_cu/gemm.cu": _FUSED,
    "kernels_cu/gemm_epilogue.cuh": _FUSED,
    "kernels_cu/gemm_results.cuh": _FUSED,
    "kernels_cu/split_columns.cu": ("tests/cuda/test_split.py", "-k", "host and columns"),
    "kernels_cu/split_exact.cuh": (*_SPLIT, "-k", "host and (repair or gathered or normal or rows-scaled)"),
    "kernels_cu/split_copy.cuh": _PRODUCTS,
    "kernels_cu/split_gemm.cu": _PRODUCTS,
    "kernels_cu/split_repair.cu": ("tests/cuda/test_split.py", "-k", "host and (repair or gathered or normal)"),
    "kernels_cu/split_rows.cu": ("tests/cuda/test_split.py", "-k", "host and 22_bits"),
    "kernels_cu/teams.cuh": (
        KERNELS,
        HELD_COLUMNS,
        "-k",
        "(host and affine_softmax-2x1025-float32) or (share and affine_softmax)",
    ),
}
# Whose barriers are in what stands in for instructions on the CPU; and one that a vote of the same lanes follows, at
# which they meet on the CPU.
_UNSEEN = ("tensor_cores.cuh", "barriers.cuh", "clusters.cuh", "gemm_scales.cuh")


def barriers() -> list[Mutant]:
    """Return a mutant for each barrier."""
    found = []
    for path in sorted(p for p in (ROOT / "kernels_cu").glob("*.cu*") if p.name not in _UNSEEN):
        text = path.read_text()
        file = f"kernels_cu/{path.name}"
        for match in _BARRIER.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            start = match.start()
            while text.count(text[start : match.end()]) > 1:  # longer, until it occurs once
                start = text.rfind("\n", 0, start)
            old = text[start : match.end()]
            new = old[: match.start() - start] + ";"
            found.append(Mutant(f"no barrier in line {line} of {path.name}", file, old, new, TESTS[file]))
    return found
