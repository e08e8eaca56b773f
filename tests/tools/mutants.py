"""Ways to break the library, each with the tests that see it; `mutate.py` tries them."""

from __future__ import annotations

from gemm_mutants import GEMM_MUTANTS
from mutant import KERNELS, Mutant


def kernels(select: str) -> tuple[str, ...]:
    """The kernel tests on the CPU whose names hold this: best a single case, as each has kernels to compile."""
    return (KERNELS, "-k", f"host and ({select})")


ON_GPU = "tests/engines/test_cuda.py"
HELD_COLUMNS = "tests/cuda/test_held_columns.py"
REDUCTIONS, TEAMS = "kernels_cu/reductions.cuh", "kernels_cu/teams.cuh"


def rows(select: str) -> tuple[str, ...]:
    """The tests of rows that begin between vectors, are packed or shared."""
    return ("tests/cuda/test_rows.py", "-k", select)


def held_columns(select: str) -> tuple[str, ...]:
    return (HELD_COLUMNS, "-k", select)


def summed(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_summed_rows.py", "-k", f"one_launch and {select}")


def integers(select: str) -> tuple[str, ...]:
    return ("tests/trace/test_integers.py", "-k", f"host and {select}")


STAGES, LANES = "kernels_cu/stages.cuh", "kernels_cu/row_lanes.cu"
PACKS, STREAMED = "kernels_cu/add_pack.cuh", "kernels_cu/streamed_stages.cuh"
TYPES, COLUMNS = "kernels_cu/types.cuh", "kernels_cu/column_stats.cu"
HELD_ROW, MERGE, SUMMED = "kernels_cu/held_row.cuh", "kernels_cu/column_merge.cuh", "kernels_cu/row_columns.cu"
FUNCTIONS, COPY = "kernels_cu/functions.cuh", "kernels_cu/split_copy.cuh"
QUICK, ACTIVATIONS = "kernels_cu/quick.cuh", "cupyfuse/rewrite/activations.py"

ABOUT_MAXIMUM = ("tests/cuda/test_fused_gemm.py", "-k", "about_the_maximum and host and (523-128by1 or 4300-128by1)")

ROWS, GEMM, REPAIR = "kernels_cu/split_rows.cu", "kernels_cu/split_gemm.cu", "kernels_cu/split_repair.cu"
EXACT, FINISH = "kernels_cu/split_exact.cuh", "kernels_cu/split_finish.cu"
SCALES = "kernels_cu/gemm_scales.cuh"
TILES, PIECES, DOUBTS = (f"kernels_cu/split_{name}.cuh" for name in ("tiles", "pieces", "doubts"))
SPLIT_COLUMNS = "kernels_cu/split_columns.cu"


def quick(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_quick.py", "-k", select)


def exponentials(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_exponentials.py", "-k", select)


def activations(select: str) -> tuple[str, ...]:
    return ("tests/rewrite/test_activations.py", "-k", select)


def splits(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_split.py", "-k", f"host and ({select})")


def anywhere(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_rows.py", "-k", f"begin_anywhere and ({select})")


def repeated(select: str) -> tuple[str, ...]:
    return ("tests/engines/test_repeated_rows.py", "-k", f"host and ({select})")


def swapped(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_swapped_pairs.py", "-k", f"host and rotary and ({select.replace('-', ' and ')})")


def blocked(select: str) -> tuple[str, ...]:
    """The tests of rows that have several strides."""
    return ("tests/cuda/test_rows_in_blocks.py", "-k", f"host and ({select})")


def pairs(select: str) -> tuple[str, ...]:
    return ("tests/torch/test_pairs.py", "-k", select)


PAIRS = "cupyfuse/torch/graphs/pairs.py"


def several_packs() -> tuple[str, ...]:
    return ("tests/cuda/test_rows.py", "-k", "several_packs")


def epilogues(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_split_epilogues.py", "-k", f"host and ({select})")


def one_part(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_rounded.py", "-k", f"host and ({select})")


def scaled(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_scaled_gemm.py", "-k", f"host and ({select})")


def own_rounded(select: str) -> tuple[str, ...]:
    return ("tests/plan/test_rounded_products.py", "-k", f"host and own and ({select})")


FINGERPRINT, KERNEL_TEXT = "kernels_cu/fingerprint.cu", "cupyfuse/cuda/kernel.py"
LAUNCH_TEXT, LAUNCHES = "cupyfuse/cuda/launch.py", "tests/cuda/test_launch.py"
LAUNCHER, LAUNCHER_TEXT = "launcher/launches.c", "cupyfuse/cuda/launcher.py"


DIRECT = "launcher/calls.c"


def direct(select: str) -> tuple[str, ...]:
    """The tests of calls that the compiled launcher recognises."""
    return ("tests/api/test_direct_calls.py", "tests/api/test_direct_calls_changing.py", "-k", select)


def compiled(select: str) -> tuple[str, ...]:
    """The tests of the compiled launcher."""
    return ("tests/cuda/test_launcher.py", "tests/cuda/test_launcher_safety.py", "-k", select)


AUTOGRAD, PREPACKED = "cupyfuse/torch/chains/autograd.py", "cupyfuse/torch/chains/prepacked.py"
WEIGHT_CHANGES = "cupyfuse/torch/chains/weight_changes.py"


def stale(select: str) -> tuple[str, ...]:
    return ("tests/torch/test_stale.py", "-k", f"not cuda and not cpu and ({select})")


def fingerprints(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_fingerprint.py", "-k", f"host and ({select})")


SCAN = "kernels_cu/scan.cu"


def scans(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_scan.py", "-k", f"host and ({select})")


MUTANTS: tuple[Mutant, ...] = (
    # Running totals
    Mutant("a lane that adds itself, scan", SCAN, "lane >= by ? Op", "lane >= by - 1 ? Op", scans("totals and shape1")),
    Mutant("lanes far apart, scan", SCAN, "by = 1; by < 32", "by = 1; by < 16", scans("totals and shape3")),
    Mutant(
        "a carry of the last columns alone, scan",
        SCAN,
        "carry = __shfl_sync(whole_warp, total, 31);",
        "carry = __shfl_sync(whole_warp, mine, 31);",
        scans("totals and shape4"),
    ),
    Mutant(
        "blocks without a carry, scan",
        SCAN,
        "carry = __shfl_sync(whole_warp, so_far, 31);",
        "",
        scans("totals and shape8"),
    ),
    Mutant(
        "the total of the warp itself, scan", SCAN, "place > 0 ? place - 1 : 0", "place", scans("totals and shape5")
    ),
    Mutant("zero instead of the identity, scan", SCAN, "T(-0.0)", "T(0.0)", scans("special")),
    Mutant("one set of totals, scan", SCAN, "? 32 : 0);", "? 0 : 0);", scans("totals and shape8")),
    Mutant(
        "columns side by side, scan",
        SCAN,
        "from[col * col_stride] : Op::template identity<T>();\n        const T total",
        "from[col] : Op::template identity<T>();\n        const T total",
        scans("strides"),
    ),
    Mutant(
        "columns beyond the row, scan",
        SCAN,
        "            if (col < cols) {\n                to[col] = Op",
        "            if (true) {\n                to[col] = Op",
        scans("totals and shape5"),
    ),
    # Fingerprints
    Mutant(
        "elements that do not count where they are",
        FINGERPRINT,
        "mixed(first + n + 1)",
        "mixed(1)",
        fingerprints("small"),
    ),
    Mutant("one hash for equal matrices", FINGERPRINT, "mixed(first + n + 1)", "mixed(n + 1)", fingerprints("several")),
    Mutant("half of 16 bytes", FINGERPRINT, " ^ low) ^ high)", " ^ low))", fingerprints("small")),
    Mutant(
        "vectors of what is not aligned",
        FINGERPRINT,
        " && reinterpret_cast<i64>(at) % 16 == 0",
        "",
        fingerprints("stays"),
    ),
    Mutant("vectors of what lies apart", FINGERPRINT, " && m.col_stride == m.itemsize", "", fingerprints("layout")),
    Mutant("vectors beyond the row", FINGERPRINT, "if (col + width <= m.cols && ", "if (", fingerprints("between")),
    Mutant(
        "elements beyond the row", FINGERPRINT, "k < width && col + k < m.cols", "k < width", fingerprints("between")
    ),
    Mutant(
        "the same columns of every row",
        FINGERPRINT,
        "/ m.places + row) % runs",
        "/ m.places) % runs",
        fingerprints("long_rows"),
    ),
    Mutant(
        "a lane that is not added", FINGERPRINT, "mask = 1; mask < 32", "mask = 2; mask < 32", fingerprints("stays")
    ),
    Mutant("no last block", FINGERPRINT, "- 1)) < gridDim.x", "- 1)) <= gridDim.x", fingerprints("stays")),
    Mutant("a sum that grows", FINGERPRINT, "    state->sum = 0;\n", "", fingerprints("stays")),
    Mutant(
        "hashes that count as blocks",
        FINGERPRINT,
        "(sum << count_bits) + 1",
        "(sum << (count_bits - 1)) + 1",
        fingerprints("stays"),
    ),
    Mutant("a token without effect", FINGERPRINT, "mixed(token + ", "mixed(0 * token + ", fingerprints("token")),
    Mutant(
        "a generation that nobody counts",
        FINGERPRINT,
        "&kept->generation, 1ull) + 1",
        "&kept->generation, 0ull) + 1",
        fingerprints("streams"),
    ),
    Mutant(
        "what other streams write is taken",
        FINGERPRINT,
        "generation != known.own;",
        "0;",
        fingerprints("streams"),
    ),
    Mutant(
        "kernels that always run", KERNEL_TEXT, "*(condition if conditional else []),", "", fingerprints("conditional")
    ),
    Mutant(
        "kernels that run where nothing changed",
        KERNEL_TEXT,
        "if (*p.changed == 0)",
        "if (*p.changed != 0)",
        fingerprints("conditional"),
    ),
    # Changes of weights
    Mutant("steps that nobody counts", WEIGHT_CHANGES, "optimizer_steps.value += 1", "pass", stale("counted")),
    Mutant("gradients that nobody counts", AUTOGRAD, "counter.value += 1", "pass", stale("by_hand")),
    Mutant("changes that the device is not told of", PREPACKED, "self._token += 1", "pass", stale("single_writes")),
    Mutant("states without a check", PREPACKED, "state + CHANGED_AT", "buffers.address + 16", stale("unchanged")),
    Mutant(
        "one state for all streams", PREPACKED, "self._states.get(stream)", "self._states.get(0)", stale("their_own")
    ),
    Mutant(
        "graphs that find what nobody packed",
        PREPACKED,
        "self.expired = not self._captured",
        "self.expired = True",
        ("tests/torch/test_stale_programs.py", "-k", "0 or 2 or 4"),
    ),
    Mutant("a refresh that nobody hears of", PREPACKED, "self._words[:1].zero_()", "pass", stale("graphs")),
    Mutant(
        "memory that a graph still uses, given back",
        PREPACKED,
        "                held.append(self)",
        "                pass",
        stale("graphs"),
    ),
    Mutant(
        "memory that other streams still read",
        PREPACKED,
        "        if replaced:\n",
        "        if False:\n",
        stale("their_own"),
    ),
    # Products from halves
    Mutant("a scale that overflows float16", PIECES, "14 + 127 - static", "16 + 127 - static", splits("22_bits")),
    Mutant("a low part without its own scale", PIECES, "* 2048.0f", "* 1024.0f", splits("22_bits")),
    Mutant("a row of padding that is read", ROWS, "row < rows ? cols : 0", "cols", splits("22_bits")),
    Mutant("small elements that are not counted", PIECES, "< 0x1p-14f;", "< 0x1p-24f;", splits("small")),
    Mutant("a column of padding that is read", SPLIT_COLUMNS, "row < rows ? cols : 0", "cols", splits("columns")),
    Mutant(
        "a strip's atoms written over the next ones",
        SPLIT_COLUMNS,
        "min(static_cast<i64>(4), groups - first / 8) * 64",
        "4 * 64",
        splits("columns"),
    ),
    Mutant("corrections of twice their weight", GEMM, "part[i] *= 0x1p-11f", "part[i] *= 0x1p-10f", splits("float32")),
    Mutant(
        "stages that are never free",
        COPY,
        "ring.parity ^ 1);\n            messages",
        "ring.parity);\n            messages",
        splits("float32"),
    ),
    Mutant(
        "both rows as the first one",
        GEMM,
        "row, at, r[row_of_sum(k) / 8])",
        "row, at, r[0])",
        epilogues("row_factor-finite"),
    ),
    Mutant("rows of the next tile", GEMM, "rows.first + row_of_sum(k) >= p.rows || ", "", splits("several")),
    Mutant("columns of the next tile", GEMM, " || column_of_sum(k) >= columns", "", splits("several")),
    Mutant("doubts of the first chunk", GEMM, "noted.add(c * count,", "noted.add(0,", splits("every_width")),
    Mutant(
        "a message that is told too early",
        COPY,
        "tell(messages, own, told++)",
        "tell(messages, own, 1)",
        splits("several"),
    ),
    Mutant("factors that are too small", TILES, "exponent() - (127 - 63) > 2 * 63", "false", splits("whole_tiles")),
    Mutant(
        "factors that need a mask", COPY, "SplitRow::of(column).factor() : column", "column : column", splits("float32")
    ),
    Mutant("no care for sums", COPY, "care = any_doubtful ? Care::of_sums :", "care =", splits("every_tile")),
    Mutant("a repair beyond the last column", GEMM, "rows) & ~outside", "rows)", splits("every_tile")),
    Mutant(
        "the wide product for columns",
        "cupyfuse/plan/schedule/placement.py",
        "dtypes.compute_dtype(n.dtype) == n.dtype or is_exact(n)",
        "dtypes.compute_dtype(n.dtype) == n.dtype",
        ("tests/plan/test_recompute.py", "-k", "rounded_for_all and numpy"),
    ),
    Mutant(
        "what is cheap to compute is stored",
        "cupyfuse/plan/schedule/recompute.py",
        "return _storing_less(found, limits)[:2]",
        "return found[:2]",
        ("tests/plan/test_recompute.py", "-k", "few_operations and numpy"),
    ),
    Mutant(
        "values beside extrema in several forms",
        "cupyfuse/plan/schedule/recompute.py",
        "n in limits.alone or (",
        "(",
        ("tests/plan/test_recompute.py", "-k", "equal_their_extrema"),
    ),
    Mutant(
        "comparisons with extrema alone",
        "cupyfuse/plan/schedule/extrema.py",
        "reader.op in COMPARISONS.values() or differs",
        "reader.op in COMPARISONS.values()",
        ("tests/plan/test_recompute.py", "-k", "equal_their_extrema and differences"),
    ),
    Mutant("bits of the next word", DOUBTS, "k / 32 + 1 == w ?", "k / 32 + 2 == w ?", splits("every_width")),
    Mutant("doubts of the lower row", DOUBTS, "k / 2 % 2 * 8", "0", splits("every_width")),
    Mutant("a tile too far down", "kernels_cu/tile_order.cuh", "within % height", "within % band", splits("float32")),
    Mutant("lo of A for that of B", GEMM, "with_lo == lo_of_a ?", "with_lo != lo_of_b ?", splits("lo_is")),
    Mutant("half of the corrections", GEMM, "if (with_lo == lo_of_both)", "if (false)", splits("float32")),
    Mutant("lo of both in all tiles", GEMM, "says == (lo_of_both | alike_in_tile)", "true", splits("lo_is")),
    Mutant("lo that nobody copied", COPY, "= lo_of_a * with_a", "= lo_of_a", splits("lo_is")),
    Mutant("the first marks of a strip for all", COPY, "is_last ? 0 : groups", "0", splits("tile_by_tile")),
    Mutant("the marks of one group", COPY, "(lane < count ? lane : count - 1)", "0", splits("tile_by_tile")),
    Mutant(
        "the first tile's columns",
        COPY,
        "next = TileScales<Columns>(p.a, p.b, row, col)",
        "next = TileScales<Columns>(p.a, p.b, row, 0)",
        splits("several"),
    ),
    Mutant("doubts of columns alone", COPY, "of_rows |= SplitRow", "SplitRow", splits("every_tile")),
    Mutant("doubts of rows alone", COPY, "of_columns |= SplitRow", "SplitRow", splits("every_tile")),
    Mutant(
        "marks of one piece", ROWS, "0xffu << threadIdx.x % 32 / 8 * 8", "1u << threadIdx.x % 32", splits("22_bits")
    ),
    Mutant("marks of half a block", SPLIT_COLUMNS, "any_lo |= any", "any_lo = any", splits("22_bits")),
    Mutant("an odd power of two", TILES, "row.other_half() + col", "row.half() + col", splits("exponents")),
    Mutant(
        "marks that are left out beside others",
        ROWS,
        "if (!SplitRow::of(entry).lo_everywhere()) {",
        "if (false) {",
        splits("22_bits"),
    ),
    Mutant("flags of one operand alone", GEMM, " + of_col.accurate_from()", "", splits("magnitudes or nothing_else")),
    Mutant(
        "one element of a lane", REPAIR, "rest != 0; ++k, rest >>= 1", "rest != 0; ++k, rest = 0", splits("every_width")
    ),
    Mutant(
        "rows of marked columns alone",
        EXACT,
        "!a.marked(row)",
        "a.marked(row)",
        splits("repair"),
    ),
    Mutant("flags that are never set", TILES, "return none ? -1e30f", "return true ? -1e30f", splits("nothing_else")),
    Mutant("marked rows of the last group", EXACT, "last && count > 0", "last && count > 16", splits("repair")),
    # Products in one part
    Mutant("a factor of the odd half", FINISH, "power - power / 2", "power / 2", one_part("exact_as_tf32")),
    Mutant("column factors too large", FINISH, "any_careful(b, 63)", "any_careful(b, 127)", one_part("exponents")),
    Mutant("small elements that go unseen", FINISH, "of.accurate_from() > 0.0f || ", "", one_part("nothing_else")),
    Mutant("infinities that set a scale", PIECES, "Parts == 1 && found >=", "false && found >=", one_part("repair")),
    Mutant("tiny numbers that become zero", PIECES, "near.bits |= 1;", ";", own_rounded("infinity")),
    Mutant("care that is not taken", SCALES, "care = small != 0 || least", "care = least", scaled("128by2 and small")),
    Mutant("factors that underflow", SCALES, "(127u - 63) << 23", "1u << 23", scaled("128by2 and underflow")),
    Mutant("factors that overflow", SCALES, "(127u + 63) << 23", "254u << 23", scaled("128by2 and overflow")),
    Mutant("rows of the other part", SCALES, "part % Parts * 16", "0", scaled("scale and whole-128by1alternating")),
    Mutant("the scale of the row above", SCALES, "/ 4 + 8 * h)}", "/ 4)}", scaled("scale and whole-128by1")),
    Mutant(
        "columns of another chunk",
        "kernels_cu/gemm_epilogue.cuh",
        "of_columns + c * chunk",
        "of_columns",
        scaled("scale and whole-128by1"),
    ),
    Mutant("scales undone twice", FINISH, "factors, careful", "factors, false", one_part("nothing_else")),
    Mutant("a sum that all lanes take", SCALES, "lane == other ? k : -1", "k", own_rounded("special and small")),
    # Barriers, and who may write when
    Mutant("one set of slots for all reductions", TEAMS, "turn ^= 1;", "", kernels("normalised-2x3000")),
    Mutant(
        "a barrier for some warps",
        TEAMS,
        "__syncthreads();",
        "if (wanted) __syncthreads();",
        kernels("reductions-2x1500-float32"),
    ),
    Mutant(
        "every lane writes its warp's slot",
        TEAMS,
        "if (threadIdx.x % 32 == 0) {\n            *reinterpret_cast<Totals*>(slots + rank() / 32 * Slot)",
        "{\n            *reinterpret_cast<Totals*>(slots + threadIdx.x % 32 * Slot)",
        kernels("affine_softmax-2x1025-float32"),
    ),
    Mutant(
        "one warp's slot too many", TEAMS, "lane < warps", "lane <= warps", kernels("affine_softmax-2x1025-float32")
    ),
    Mutant(
        "shuffles over half a group",
        TEAMS,
        "for (int mask = 1; mask < G; mask *= 2) {\n            totals.exchange",
        "for (int mask = 2; mask < G; mask *= 2) {\n            totals.exchange",
        kernels("affine_softmax-3x33-float32"),
    ),
    Mutant(
        "members of the wrong group",
        TEAMS,
        "<< (threadIdx.x % 32 / G * G)",
        "<< 0",
        ("tests/cuda/test_fused_gemm.py", "-k", "host and test_tails and 37 and several"),
    ),
    # Bounds
    Mutant(
        "a column too many in registers",
        STAGES,
        "if (k < span.packed) {\n                p.template load<V>",
        "if (k <= span.packed) {\n                p.template load<V>",
        kernels("affine_softmax-3x1000-float32"),
    ),
    Mutant(
        "a column too many computed",
        STAGES,
        "if (k < span.packed) {\n            auto tile",
        "if (k <= span.packed) {\n            auto tile",
        rows("row_block and softmax and 256 and not packed"),
    ),
    Mutant(
        "a column too many in a stream",
        STREAMED,
        "if (start + i * step < last) {\n                p.template load<V>",
        "if (start + i * step <= last) {\n                p.template load<V>",
        kernels("reductions-1x70000-float32"),
    ),
    Mutant(
        "a stream that reads its packs twice",
        STREAMED,
        "start < last; start += Items * step",
        "start < last; start += step",
        kernels("reductions-1x70000-float32"),
    ),
    Mutant(
        "the last pack of a thread left out of its totals",
        STAGES,
        "p.template add<V>(At<S>(), &e.packs",
        "if (i == 0) p.template add<V>(At<S>(), &e.packs",
        rows("row_block and softmax and 256 and not packed"),
    ),
    Mutant(
        "a row too many for lanes",
        HELD_ROW,
        "const bool exists = at < p.rows;",
        "const bool exists = at <= p.rows;",
        rows("row_lanes and 3rows and softmax"),
    ),
    Mutant(
        "a warp that ends where its last group has no row",
        LANES,
        "if (warp + k * step < p.rows)",
        "if (first + threadIdx.x / G + k * step < p.rows)",
        rows("row_lanes and 3rows and softmax"),
    ),
    Mutant(
        "the second of the rows that lanes load computed from the first",
        LANES,
        "rows[k].span, rows[k].r, rows[k])",
        "rows[k].span, rows[k].r, rows[0])",
        rows("row_lanes and 3rows and softmax"),
    ),
    Mutant(
        "exponentials relative to the maximum of a lane",
        STAGES,
        "            team.lead(totals);\n        }\n        totals.start();",
        "        }\n        totals.start();",
        rows("row_lanes and 3rows and softmax"),
    ),
    Mutant(
        "exponentials in the place of what later stages read for the first time",
        "cupyfuse/cuda/emit.py",
        "for n, first in program.first_computed.items() if first > stage",
        "for n in program.step.nodes if program.stage[n] > stage",
        exponentials("leave_what_later_stages_read"),
    ),
    Mutant(
        "shares of a huge maximum that are scaled",
        REDUCTIONS,
        "fabsf(m) < 1.2e9f ? 1.44269504f : 1.0f",
        "1.44269504f",
        exponentials("magnitude and bfloat16 and row_block"),
    ),
    Mutant(
        "bases on two sides of what is huge, as if on one",
        REDUCTIONS,
        "return scale == to.scale ? exp2f(shift - to.shift) : 0.0f;",
        "return exp2f(shift - to.shift);",
        exponentials("magnitude and bfloat16"),
    ),
    Mutant(
        "a base that no maximum moves",
        REDUCTIONS,
        "if (always || from.is_below(this->ahead)) {",
        "if (always) {",
        exponentials("magnitude and bfloat16 and row_block-packed"),
    ),
    Mutant(
        "the base of no elements at zero",
        REDUCTIONS,
        "float scale = 1.0f, shift = lowest;",
        "float scale = 1.44269504f, shift = 0.0f;",
        exponentials("magnitude and bfloat16 and row_block-packed"),
    ),
    Mutant(
        "lanes whose bases differ",
        TEAMS,
        "totals.settle(true);",
        "totals.settle();",
        exponentials("magnitude and bfloat16"),
    ),
    Mutant(
        "pairs of results the wrong way round",
        TYPES,
        "Narrow<T>::pair(results.v[2 * i], results.v[2 * i + 1])",
        "Narrow<T>::pair(results.v[2 * i + 1], results.v[2 * i])",
        exponentials("magnitude and bfloat16 and row_block-packed"),
    ),
    Mutant(
        "a reciprocal that nothing checks",
        "cupyfuse/cuda/expressions.py",
        "            self._check_row(reciprocal)\n        else:",
        "            pass\n        else:",
        exponentials("without_a_reciprocal and row_block-packed"),
    ),
    Mutant(
        "groups of lanes that merge nothing",
        STAGES,
        "        team.gather(totals);\n",
        "",
        rows("row_lanes and 3rows and softmax"),
    ),
    Mutant(
        "values of other columns than those of a lane's packs",
        HELD_ROW,
        "hold_columns(col, this->packs[i])",
        "hold_columns(0, this->packs[i])",
        rows("columns_of_every_stage"),
    ),
    Mutant(
        "a share of a row left out",
        STAGES,
        "share < p.shares",
        "share + 1 < p.shares",
        kernels("exponentials-2x16400-float32"),
    ),
    Mutant(
        "a row too many for blocks",
        "kernels_cu/row_block.cu",
        "row < p.rows",
        "row <= p.rows",
        kernels("softmax-2x1025-float32"),
    ),
    Mutant(
        "a row too many for streams",
        "kernels_cu/row_stream.cu",
        "row < p.rows",
        "row <= p.rows",
        kernels("reductions-1x70000-float32"),
    ),
    Mutant(
        "warps that share a row",
        "kernels_cu/row_stream.cu",
        "blockIdx.x) * Rows + threadIdx.x / 32",
        "blockIdx.x) * Rows + threadIdx.x / 64",
        rows("every_way and row_stream and 128x4 and 251"),
    ),
    Mutant(
        "warps that read the rows of other blocks",
        "kernels_cu/row_stream.cu",
        "static_cast<i64>(gridDim.x) * Rows);",
        "static_cast<i64>(gridDim.x));",
        rows("reads_several_rows"),
    ),
    Mutant(
        "warps that leave rows out",
        "kernels_cu/row_stream.cu",
        "static_cast<i64>(gridDim.x) * Rows);",
        "2 * static_cast<i64>(gridDim.x) * Rows);",
        rows("reads_several_rows"),
    ),
    Mutant("packs that begin too early", STAGES, "return before + k;", "return k;", rows("anywhere")),
    Mutant(
        "a single element too many",
        STAGES,
        "has_singles && k < cols - packed",
        "has_singles && k <= cols - packed",
        rows("anywhere"),
    ),
    Mutant("single elements of the packs", STAGES, "k < before ? k : packed + k", "k", rows("anywhere")),
    Mutant(
        "vectors that begin at different places",
        "cupyfuse/engines/kernel_launch.py",
        "return self.arguments.are_shifted_alike(addresses, access.vec, access.apart)",
        "return True",
        rows("anywhere"),
    ),
    Mutant(
        "totals of the other reduction",
        "kernels_cu/cluster_team.cuh",
        "++round;",
        "",
        rows("one_after_the_other"),
    ),
    Mutant(
        "packs that have not arrived",
        "kernels_cu/row_shared.cu",
        "Packs - 1 - i : 0",
        "Packs - i : 0",
        rows("one_after_the_other"),
    ),
    Mutant(
        "values of columns that nobody waits for",
        "kernels_cu/row_shared.cu",
        "copies_wait(Packs);",
        "",
        held_columns("share"),
    ),
    Mutant(
        "values of columns of the first team alone",
        "kernels_cu/row_shared.cu",
        "i < Packs; i += Teams)",
        "i < Packs; i += Teams + 1)",
        held_columns("share"),
    ),
    Mutant(
        "teams that have the totals of one",
        "kernels_cu/cluster_team.cuh",
        "block.number() * bytes_of_slots + ",
        "",
        held_columns("share"),
    ),
    Mutant(
        "teams that hold their rows at one place",
        "kernels_cu/row_shared.cu",
        "free += team.block.number() * ",
        "free += ",
        held_columns("share"),
    ),
    Mutant(
        "clusters of rows that begin at different places",
        "cupyfuse/engines/kernel_launch.py",
        "max(1, clusters // places) * places",
        "clusters",
        held_columns("begin_at_the_same_place"),
    ),
    Mutant(
        "clusters that wait for room, with values of columns of their own",
        "cupyfuse/cuda/shared_rows.py",
        "return _TURNS if cluster == 1 or many_left_out else 1",
        "return _TURNS",
        held_columns("begin_at_the_same_place"),
    ),
    Mutant(
        "a cluster for each row where there is room for few",
        "cupyfuse/engines/kernel_launch.py",
        "return min(rows, at_once)",
        "return rows",
        held_columns("has_its_multiprocessors_to_itself"),
    ),
    Mutant(
        "packs that nobody waits for",
        "kernels_cu/row_shared.cu",
        "(Items == Packs || i == 0)",
        "Items == Packs",
        rows("one_after_the_other"),
    ),
    Mutant(
        "values that are not finite, left as they are",
        "kernels_cu/stages.cuh",
        "done &= accumulate_pack",
        "accumulate_pack",
        rows("row_shared and not_finite"),
    ),
    Mutant(
        "values that are accumulated twice",
        "kernels_cu/stages.cuh",
        "source, totals)) {\n        totals = p.totals(At<S>());",
        "source, totals)) {",
        rows("row_shared and not_finite"),
    ),
    Mutant(
        "a pack loaded again after its result was stored there",
        "kernels_cu/stages.cuh",
        "if constexpr (How == Exact::kept) {",
        "if constexpr (false) {",
        rows("row_shared and not_finite"),
    ),
    Mutant(
        "words of one block only",
        "kernels_cu/cluster_team.cuh",
        "slot(set, cluster_rank())",
        "slot(set, 0)",
        rows("every_way and softmax-5x256-row_shared-32x2-2"),
    ),
    Mutant("elements one pack too far", "kernels_cu/elementwise.cu", "k < end;", "k <= end;", several_packs()),
    Mutant(
        "a row that two threads compute",
        "kernels_cu/elementwise.cu",
        "row += 2 * apart",
        "row += apart",
        several_packs(),
    ),
    Mutant("the last of odd rows", "kernels_cu/elementwise.cu", "if (row < p.rows) {", "if (false) {", several_packs()),
    Mutant(
        "packs behind one row", "kernels_cu/elementwise.cu", " && number < packs.packs_a_row", "", kernels("pointwise")
    ),
    Mutant("the next row's packs", "kernels_cu/elementwise.cu", "            ++row;\n", "", several_packs()),
    Mutant(
        "packs of the next block", "kernels_cu/elementwise.cu", "of_block < packs.total ?", "false ?", several_packs()
    ),
    Mutant(
        "packs before a row", "kernels_cu/elementwise.cu", "col < 0 || col + reach", "col + reach", anywhere("elements")
    ),
    Mutant("packs behind a row", "kernels_cu/elementwise.cu", " || col + reach > p.cols", "", anywhere("elements")),
    Mutant(
        "one pack less of a shifted row", "kernels_cu/elementwise.cu", "1 + (p.cols", "(p.cols", anywhere("elements")
    ),
    Mutant(
        "a share one row too long",
        COLUMNS,
        "first + share < rows ? first + share : rows",
        "first + share < rows ? first + share + 1 : rows",
        kernels("column_reductions-600x5-float32"),
    ),
    Mutant(
        "rows that no share has",
        COLUMNS,
        "(rows + gridDim.y - 1) / gridDim.y",
        "rows / gridDim.y",
        kernels("column_reductions-5400x34-float32"),
    ),
    Mutant(
        "the last share left out",
        MERGE,
        "if (share + k * groups < p.shares) {\n                    merged",
        "if (share + k * groups + 1 < p.shares) {\n                    merged",
        kernels("column_reductions-5400x34-float32"),
    ),
    Mutant(
        "the first shares of each group alone",
        MERGE,
        "share < p.shares; share += ahead * groups",
        "share < p.shares; share = p.shares",
        kernels("column_reductions-5400x34-float32"),
    ),
    Mutant(
        "the last group of shares left out",
        MERGE,
        "k < groups && k < p.shares; ++k",
        "k < groups && k + 1 < p.shares; ++k",
        kernels("column_reductions-600x5-float32"),
    ),
    Mutant(
        "one row for all of a lane",
        COLUMNS,
        "column[i] = e[i * V + j]",
        "column[i] = e[j]",
        kernels("column_reductions-5400x34-float32"),
    ),
    Mutant(
        "parts of a sum that overlap",
        COLUMNS,
        "from += turns * step",
        "from += step",
        kernels("column_sums-5400x34-float32"),
    ),
    Mutant(
        "what roundings add, added twice",
        "kernels_cu/reductions.cuh",
        "next = x - excess,",
        "next = x + excess,",
        ("tests/cuda/test_kernels.py", "-k", "host and sums_down_columns"),
    ),
    Mutant(
        "the last warp of a strip left out",
        COLUMNS,
        "w < warps; ++w",
        "w + 1 < warps; ++w",
        kernels("column_reductions-300x7-float32"),
    ),
    Mutant(
        "lanes of a strip added across columns",
        COLUMNS,
        "for (int mask = across; mask < 32; mask *= 2) {\n            totals[j].exchange",
        "for (int mask = 1; mask < 32; mask *= 2) {\n            totals[j].exchange",
        kernels("column_reductions-2x3-float32"),
    ),
    Mutant(
        "rows behind the last group of a lane left out",
        COLUMNS,
        "for (const i64 end = start + Items < to ? start + Items : to; start < end; ++start) {",
        "for (const i64 end = start; start < end; ++start) {",
        kernels("column_reductions-2x3-float32"),
    ),
    Mutant(
        "deviations of a pack from the first element",
        PACKS,
        "terms[j] = (differences[j] - mean) * (differences[j] - mean);",
        "terms[j] = differences[j] * differences[j];",
        kernels("column_moments-40x3-float32-offset"),
    ),
    Mutant(
        "a column behind the last one",
        COLUMNS,
        "threadIdx.x < Strip && mine < cols",
        "threadIdx.x < Strip && mine <= cols",
        kernels("column_reductions-2x3-float32"),
    ),
    # Rows whose columns are reduced, too
    Mutant(
        "sums that begin anew without those before",
        "kernels_cu/row_columns.cu",
        "if (again) {",
        "if (again && p.rows < 0) {",
        (
            "tests/cuda/test_summed_rows.py",
            "-k",
            "one_launch and norm_gradients and 67x64 and 64by64-8-2",
        ),
    ),
    Mutant(
        "columns of the first pack of a thread alone",
        SUMMED,
        "auto& totals = sums[i * V + j];",
        "auto& totals = sums[j];",
        summed("50x100 and 64by16-4 and norm_gradients"),
    ),
    Mutant(
        "columns added in each stage",
        SUMMED,
        "S == P::column_stage",
        "S <= P::column_stage",
        summed("67x64 and 64by16-4 and norm_gradients"),
    ),
    Mutant(
        "the next row of a team in the place of the last one",
        SUMMED,
        "next.load(p, team, first + step + threadIdx.x / G);",
        "next.load(p, team, first + step);",
        summed("67x64 and 64by16-4 and norm_gradients"),
    ),
    Mutant(
        "the last turn left out",
        SUMMED,
        "first < p.rows; first += step",
        "first + step <= p.rows; first += step",
        summed("67x64 and 64by16-4 and norm_gradients"),
    ),
    Mutant(
        "the totals of the last team left out",
        SUMMED,
        "k < Threads / G; ++k",
        "k + 1 < Threads / G; ++k",
        summed("67x64 and 128by64 and norm_gradients"),
    ),
    Mutant(
        "columns that no thread of the first warps writes",
        SUMMED,
        "col < p.cols; col += Threads",
        "col < Threads; col += Threads",
        summed("50x100 and 64by16-4 and norm_gradients"),
    ),
    Mutant(
        "a column behind the last one of a single team",
        SUMMED,
        "if (col < p.cols) {\n#pragma unroll\n                for",
        "if (col <= p.cols) {\n#pragma unroll\n                for",
        summed("67x64 and 128by128 and norm_gradients"),
    ),
    # Reductions
    Mutant(
        "no rescaling in the online logsumexp",
        REDUCTIONS,
        "s *= exp_of_move(this->m - base(this->ahead));",
        "",
        kernels("column_reductions-2x3-float32"),
    ),
    Mutant(
        "no rescaling where sums are merged",
        REDUCTIONS,
        "s = s * exp_of_move(this->m - base(top)) + o.s",
        "s = s + o.s",
        kernels("column_reductions-300x7-float32"),
    ),
    Mutant(
        "-inf minus -inf",
        REDUCTIONS,
        "return m == -infinity<T>() ? T(0) : m;",
        "return m;",
        kernels("column_reductions-9x50-float32-special"),
    ),
    Mutant(
        "an infinite top with a finite sum",
        REDUCTIONS,
        "return isfinite(this->m) ? s : this->m - this->m;",
        "return s;",
        kernels("exponentials"),
    ),
    Mutant(
        "distances of the maximum before",
        REDUCTIONS,
        "            d = moved(d, n, this->m, this->ahead);",
        "",
        ABOUT_MAXIMUM,
    ),
    Mutant(
        "distances merged as they are",
        REDUCTIONS,
        "d = moved(d, n, this->m, top) + moved(o.d, o.n, o.m, top);",
        "d += o.d;",
        ABOUT_MAXIMUM,
    ),
    Mutant(
        "distances from -inf",
        REDUCTIONS,
        "return sum + (m == -infinity<T>() ? T(0) : static_cast<T>(count) * (m - to));",
        "return sum + static_cast<T>(count) * (m - to);",
        ABOUT_MAXIMUM,
    ),
    Mutant(
        "weighted distances of the maximum before",
        REDUCTIONS,
        "return m == -infinity<T>() ? e : factor * (e + rise);",
        "return m == -infinity<T>() ? e : factor * e;",
        ABOUT_MAXIMUM,
    ),
    Mutant(
        "positions of the maximum before",
        REDUCTIONS,
        "        first = same(this->m, this->ahead) ? first : none;\n",
        "",
        kernels("places-5x1400-float32-special"),
    ),
    Mutant(
        "positions of another lane",
        REDUCTIONS,
        "first = earlier(first, __shfl_xor_sync(members, first, mask));",
        "first = __shfl_xor_sync(members, first, mask);",
        kernels("places-3x513-float32"),
    ),
    Mutant(
        "the last position",
        REDUCTIONS,
        "earlier(first, static_cast<Place>(at))",
        "static_cast<Place>(at)",
        ("tests/trace/test_positions.py", "-k", "test_ties and 1000-float32 and host"),
    ),
    Mutant(
        "positions of what is less, from other shares",
        REDUCTIONS,
        "same(o.m, both) ? o.first : none",
        "o.first",
        kernels("column_places-300x7-float32"),
    ),
    Mutant("NaN nowhere", REDUCTIONS, " || (a != a && b != b)", "", kernels("places-9x50-float32-special")),
    Mutant("half of the pairs", PACKS, "n = V / 2; n > 0", "n = V / 4; n > 0", rows("every_way and reductions")),
    Mutant(
        "neighbours at one position",
        PACKS,
        "to.add(x[j], at + j)",
        "to.add(x[j], at)",
        rows("every_way and places"),
    ),
    Mutant(
        "positions among packs",
        STREAMED,
        "&e[i * V], span.column(start + i * step), totals",
        "&e[i * V], start + i * step, totals",
        rows("every_way and row_stream and places and 251"),
    ),
    Mutant(
        "positions within a chunk",
        "kernels_cu/gemm_epilogue.cuh",
        "e[h][i], first + offset(i), totals",
        "e[h][i], offset(i), totals",
        ("tests/cuda/test_fused_gemm.py", "-k", "first_positions and host and 300-128by1"),
    ),
    Mutant(
        "labels by their low 32 bits",
        TYPES,
        "static_cast<i32>(n) == static_cast<i32>(x) && x == static_cast<i32>(x);",
        "static_cast<i32>(n) == static_cast<i32>(x);",
        kernels("integers_of_two_widths"),
    ),
    Mutant(
        "maximum from zero",
        REDUCTIONS,
        "struct Max : NoLookAhead {\n    T v = -infinity<T>();",
        "struct Max : NoLookAhead {\n    T v = T(0);",
        kernels("extremes-9x50-float32-special"),
    ),
    Mutant(
        "minimum from zero",
        REDUCTIONS,
        "struct Min : NoLookAhead {\n    T v = infinity<T>();",
        "struct Min : NoLookAhead {\n    T v = T(0);",
        kernels("extremes-30x70-float32-offset1"),
    ),
    Mutant(
        "product from zero",
        REDUCTIONS,
        "struct Product : NoLookAhead {\n    T v = T(1);",
        "struct Product : NoLookAhead {\n    T v = T(0);",
        kernels("column_reductions-2x3-float32"),
    ),
    Mutant(
        "sum from one",
        REDUCTIONS,
        "struct Sum : NoLookAhead {\n    T v = T(0);",
        "struct Sum : NoLookAhead {\n    T v = T(1);",
        kernels("column_reductions-2x3-float32"),
    ),
    Mutant(
        "moments relative to nothing",
        PACKS,
        "to.first = to.n == T(0) ? static_cast<T>(x[0]) : to.first;",
        "",
        kernels("column_moments-40x3-float32-offset"),
    ),
    Mutant(
        "moments merged without their distance",
        REDUCTIONS,
        "m2 += deviations + distance * (n * share) * distance;",
        "m2 += deviations;",
        kernels("column_reductions-300x7-float32"),
    ),
    Mutant(
        "maximum that forgets NaN",
        FUNCTIONS,
        "return (a > b || a != a) ? a : b;",
        "return a > b ? a : b;",
        kernels("reductions-9x50-float32-special"),
    ),
    Mutant(
        "minimum that forgets NaN",
        FUNCTIONS,
        "return (a < b || a != a) ? a : b;",
        "return a < b ? a : b;",
        kernels("reductions-9x50-float32-special"),
    ),
    # Types
    Mutant(
        "bfloat16 that is cut off", TYPES, "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "bits >> 16", kernels("ties")
    ),
    Mutant(
        "a tie that is rounded up", TYPES, "bits + 0x7fffu + ((bits >> 16) & 1u)", "bits + 0x8000u", kernels("ties")
    ),
    Mutant(
        "float64 rounded twice on the way to bfloat16",
        TYPES,
        "bits = (away ? bits - 1u : bits) | 1u;",
        "",
        kernels("ties"),
    ),
    Mutant(
        "a quotient without its remainder",
        FUNCTIONS,
        "return copysign(fma(fma(-q, d, x), reciprocal, q), q);",
        "return copysign(q * T(1.000001), q);",
        rows("quotients_that_are_not_finite and row_lanes-64x4-1"),
    ),
    Mutant(
        "a remainder of integers with the sign of the dividend",
        FUNCTIONS,
        "return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;",
        "return rest;",
        integers("bytes and int8"),
    ),
    Mutant(
        "a quotient of integers that is cut off",
        FUNCTIONS,
        "? quotient - 1 : quotient;",
        "? quotient : quotient;",
        integers("bytes and int8"),
    ),
    Mutant(
        "the smallest integer by -1, which traps",
        FUNCTIONS,
        "return b == 0 || b == -1 ? 0 : a % b;",
        "return b == 0 ? 0 : a % b;",
        integers("awkward and int64"),
    ),
    Mutant(
        "a shift by the low bits of its count",
        FUNCTIONS,
        "return a >> (static_cast<u64>(count) < 64 ? count : 63);",
        "return a >> (count & 63);",
        integers("bytes and int8"),
    ),
    # Quick forms of 16-bit results, and activations written by hand
    Mutant("a logarithm near 1", QUICK, "-0.499999301f * unit", "-0.499f * unit", quick("accurate and host")),
    Mutant("a tanh far from 0", QUICK, "fabsf(x) < 0.25f ? x", "fabsf(x) < 0.5f ? x", quick("accurate and host")),
    Mutant("an erf far from 0", QUICK, "-9.31457766e-01f", "-9.31e-01f", quick("accurate and host")),
    Mutant("a softplus far from 0", QUICK, "-0.235038598f", "-0.2351f", quick("accurate and host")),
    Mutant("a mish that ends too soon", QUICK, "fminf(x, 20.0f)", "fminf(x, 4.0f)", quick("accurate and host")),
    Mutant(
        "equal infinities, subtracted",
        QUICK,
        "quick_choice(a == b, a + 0.693147181f,",
        "quick_choice(false, a + 0.693147181f,",
        quick("special_values and host"),
    ),
    Mutant(
        "a quick quotient that is rounded to a whole number",
        "cupyfuse/cuda/program.py",
        " and node not in self.beneath_steps",
        "",
        quick("whole_numbers"),
    ),
    Mutant("any constant", ACTIVATIONS, "else 2.0**-23)", "else 1e-2)", activations("nothing_else")),
    Mutant("float32's constants in float64", ACTIVATIONS, "2.0**-51 if", "2.0**-23 if", activations("compared_in")),
    Mutant(
        "a formula whose parts are read elsewhere",
        ACTIVATIONS,
        "all(within[i] == readers[i] for i in inner)",
        "True",
        activations("something_else_reads"),
    ),
    Mutant(
        "formulas that share a part",
        ACTIVATIONS,
        "if node in distance and node not in taken",
        "if node in distance",
        activations("largest"),
    ),
    # Guards and stages
    Mutant(
        "a pack that is not computed again",
        STAGES,
        "if (!finite) {\n            auto again",
        "if (false) {\n            auto again",
        kernels("folded-9x20-float32-special"),
    ),
    Mutant(
        "totals of a row that are not combined",
        STAGES,
        "team.reduce_first(totals);",
        "",
        kernels("reductions-2x1500-float32"),
    ),
    Mutant(
        "per-row results by a thread that lacks them",
        STAGES,
        "if (span.exists && team.rank() == 0) {",
        "if (span.exists && team.rank() == team.size() - 1) {",
        kernels("reductions-2x1500-float32"),
    ),
    # Emission and launching
    Mutant(
        "32-bit row offsets",
        "cupyfuse/cuda/parameters.py",
        "{self.row('row')} * {self.name}_rows + {col}",
        "int(row) * int({self.name}_rows) + int({col})",
        (KERNELS, "-k", "32_bit"),
    ),
    Mutant(
        "vectors whatever the alignment",
        "cupyfuse/engines/kernel_launch.py",
        "alignment=alignment, otherwise",
        "alignment=1, otherwise",
        kernels("offset"),
    ),
    Mutant(
        "threads that never launch by CuPy, compiled",
        LAUNCHER,
        "(begun & device) == 0",
        "0",
        compiled("threads_and_devices"),
    ),
    Mutant(
        "one bit for all devices, compiled",
        LAUNCHER,
        "(uint64_t)1 << steps[0].c",
        "(uint64_t)1",
        compiled("threads_and_devices"),
    ),
    Mutant(
        "addresses that are not aligned, compiled",
        LAUNCHER,
        "checked |= words[s->a].integer;",
        "",
        compiled("random_structs"),
    ),
    Mutant(
        "checks of the struct before, compiled",
        LAUNCHER,
        "                checked = 0;\n",
        "",
        compiled("random_structs"),
    ),
    Mutant(
        "copies freed before their launch, compiled",
        LAUNCHER,
        "status = PyList_Append(*held, memory);",
        "status = 0;",
        compiled("copies"),
    ),
    Mutant("copies held beyond their launch, compiled", LAUNCHER, "if (s->b) {", "if (0) {", compiled("copies")),
    Mutant(
        "references to numbers, compiled",
        LAUNCHER,
        "*value = PyFloat_AsDouble(found);\n    Py_DECREF(found);",
        "*value = PyFloat_AsDouble(found);",
        compiled("leaked"),
    ),
    Mutant(
        "maps of operands that are not aligned, compiled",
        LAUNCHER,
        "(address & (m.alignment - 1)) != 0 ||",
        "",
        compiled("random_structs"),
    ),
    Mutant(
        "launches that never begin early, compiled",
        LAUNCHER,
        ".attribute_count = steps[0].d != 0",
        ".attribute_count = 0",
        (LAUNCHES, "-k", "begin_early"),
    ),
    Mutant("structs beyond the data, compiled", LAUNCHER, "within(s->a, 8 * s->b, nbytes)", "1", compiled("programs")),
    Mutant(
        "the steps to go on with, compiled",
        LAUNCHER_TEXT,
        "len(self._steps) + 1 +",
        "len(self._steps) +",
        compiled("random_structs"),
    ),
    Mutant(
        "layouts of arrays, direct calls",
        DIRECT,
        "has(array, of_strides, PyTuple_GetItem(value, STRIDES))",
        "1",
        direct("arrays_are"),
    ),
    Mutant(
        "devices of arrays, direct calls",
        DIRECT,
        "has(data, of_device, PyTuple_GetItem(value, DEVICE))",
        "1",
        direct("device"),
    ),
    Mutant(
        "numbers of another type, direct calls",
        DIRECT,
        "(Py_TYPE(found) == Py_TYPE(expected) ? PyObject_RichCompareBool(found, expected, Py_EQ) : 0)",
        "PyObject_RichCompareBool(found, expected, Py_EQ)",
        direct("constants"),
    ),
    Mutant(
        "an array given twice, direct calls",
        DIRECT,
        "same = PyList_GetItem(arrays, k) != found;",
        "same = 1;",
        direct("twice"),
    ),
    Mutant(
        "other settings, direct calls",
        DIRECT,
        "PyObject_RichCompareBool(settings, PyTuple_GetItem(call, SETTINGS_THEN), Py_EQ)",
        "settings != NULL",
        direct("settings"),
    ),
    Mutant(
        "defaults that were replaced, direct calls",
        DIRECT,
        "found[0] == PyTuple_GetItem(call, DEFAULTS)",
        "1",
        direct("defaults"),
    ),
    Mutant(
        "variables that have changed, direct calls",
        DIRECT,
        "*variables != Py_None && has(*variables, of_key, PyTuple_GetItem(call, KEY))",
        "1",
        direct("variables"),
    ),
    Mutant(
        "references to attributes, direct calls",
        DIRECT,
        "PyObject_RichCompareBool(found, expected, Py_EQ);\n    Py_XDECREF(found);",
        "PyObject_RichCompareBool(found, expected, Py_EQ);",
        direct("leaked"),
    ),
    Mutant(
        "attributes that another function has read of a variable",
        "cupyfuse/api/signature.py",
        "if (id(holder), label, path) not in self._seen:",
        "if (id(holder), label, path) not in self._seen and self._seen[id(holder), label] == len(self._seen) - 1:",
        ("tests/api/test_members.py", "-k", "share_a_variable"),
    ),
    Mutant(
        "namespaces read by attribute, and handed on whole",
        "cupyfuse/api/variables.py",
        " and not (type(value) in NAMESPACES and is_known(value, package))",
        "",
        ("tests/api/test_captured.py", "-k", "namespaces"),
    ),
    Mutant(
        "variables bound to other objects, calls recognised by generated code",
        "cupyfuse/api/inline_cache.py",
        "if known.is_current is not None and not known.is_current():\n                continue",
        "if False:\n                continue",
        ("tests/api/test_inline_cache.py", "-k", "whatever_variables_hold"),
    ),
    Mutant(
        "comparisons of numbers do not matter to a plan",
        "cupyfuse/trace/numbers_of_call.py",
        "self.conditions[condition.text] = condition, outcome",
        "pass",
        ("tests/api/test_numbers.py", "-k", "branch"),
    ),
    Mutant(
        "generated code serves numbers for which conditions do not hold",
        "cupyfuse/api/match_writer.py",
        "if self._depends.conditions:",
        "if False:",
        ("tests/api/test_numbers.py", "-k", "branch"),
    ),
    Mutant(
        "integers that a trace reads are open",
        "cupyfuse/trace/numbers_of_call.py",
        "            self.read.add(position)\n",
        "            pass\n",
        ("tests/api/test_integers.py", "-k", "against_numpy"),
    ),
    Mutant(
        "plans with open integers are taken whatever they do",
        "cupyfuse/api/planned_function.py",
        "found if found is not None and found.does_the_same(traced) else None",
        "found",
        ("tests/api/test_integers.py", "-k", "does_not_tell"),
    ),
    Mutant(
        "floats around functions are open at once",
        "cupyfuse/trace/numbers_of_call.py",
        "(type(value) is not float or position in self._around)",
        "type(value) is not float",
        ("tests/api/test_numbers_around.py", "-k", "as_with_arguments"),
    ),
    Mutant(
        "errors of arithmetic that a function catches do not count in later calls",
        "cupyfuse/trace/numbers_of_call.py",
        "            self.conditions[raises.text] = raises, True\n",
        "",
        ("tests/api/test_numbers.py", "-k", "caught or raise_as"),
    ),
    Mutant(
        "powers that overflow in a later call do not make another plan",
        "cupyfuse/trace/numbers_of_call.py",
        "        self.conditions[number.text] = number, None\n",
        "",
        ("tests/api/test_numbers.py", "-k", "caught"),
    ),
    Mutant(
        "NumPy's numbers are weak in promotion as Python's",
        "cupyfuse/trace/operations.py",
        "g.cast(g.number(number.number, value.name), value.dtype.name)",
        "g.number(number.number, value.name)",
        ("tests/api/test_numbers.py", "-k", "computed_in_each_call"),
    ),
    Mutant(
        "numbers around functions that change are constants",
        "cupyfuse/api/around.py",
        "self._values[name] = _CHANGES\n        return True",
        "self._values[name] = value\n        return False",
        ("tests/api/test_numbers_around.py", "-k", "as_with_arguments"),
    ),
    Mutant(
        "types of numbers around functions that change",
        "cupyfuse/api/walk.py",
        "self.key.append(_TYPES[type(value)])",
        "self.key.append(float)",
        ("tests/api/test_numbers_around.py", "-k", "awkward"),
    ),
    Mutant(
        "variables that the variables' functions read belong to these",
        "cupyfuse/api/places.py",
        "[*self._around.values()][::-1]",
        "[*self._around.values()]",
        ("tests/api/test_numbers_around.py", "-k", "objects_and_variables_hold"),
    ),
    Mutant(
        "plans are kept though variables have changed during the trace",
        "cupyfuse/api/planned_function.py",
        "if _is_still(signature, read_again):",
        "if True:",
        ("tests/api/test_numbers_around.py", "-k", "is_not_kept"),
    ),
    Mutant(
        "variables that calls read have to be the same objects",
        "cupyfuse/api/current.py",
        "if (id(holder), label) in read:",
        "if False:",
        ("tests/api/test_numbers_around.py", "-k", "replaced_in_place"),
    ),
    Mutant(
        "variables that calls read, and methods compare",
        "cupyfuse/api/signature.py",
        " and probed[found] == 1",
        "",
        ("tests/api/test_numbers_around.py", "-k", "methods_read_as_well"),
    ),
    Mutant(
        "what is around a function, direct calls",
        DIRECT,
        "PyTuple_GetItem(given, number)",
        "PyTuple_GetItem(given, number * 0)",
        direct("around_are_read or leaked"),
    ),
    Mutant(
        "references to what is around a function, direct calls",
        DIRECT,
        "    Py_XDECREF(given);\n    return same;",
        "    return same;",
        direct("leaked"),
    ),
    Mutant(
        "references to the variables, direct calls",
        DIRECT,
        "        Py_XDECREF(variables);\n        Py_XDECREF(arrays);",
        "        Py_XDECREF(arrays);",
        direct("leaked"),
    ),
    Mutant(
        "biases of several products stay together",
        "cupyfuse/plan/schedule/steps.py",
        "if len(reading) < 2:",
        "if True:",
        ("tests/plan/test_epilogues.py", "-k", "several_products"),
    ),
    Mutant(
        "rows of pieces of several widths are reduced piece by piece",
        "cupyfuse/rewrite/concats.py",
        "(reduced and not (even and _is_combined(reader)))",
        "(reduced and not _is_combined(reader))",
        ("tests/plan/test_side_by_side.py", "-k", "rows_of_pieces"),
    ),
    Mutant(
        "pieces of matrices side by side are written over each other",
        "cupyfuse/engines/cuda.py",
        "self._places[whole].slice(0, 1, first, 1)",
        "self._places[whole].slice(0, 1, 0, 1)",
        ("tests/plan/test_side_by_side.py", "-k", "where_they_belong"),
    ),
    Mutant(
        "memory of matrices side by side is taken once all pieces are there",
        "cupyfuse/plan/schedule/workspace.py",
        "dict.fromkeys(pieces[n][0] if n in pieces else n for n in step.outputs)",
        "[n for n in step.outputs if n not in pieces]",
        ("tests/plan/test_side_by_side.py", "-k", "stay_while"),
    ),
    Mutant(
        "a slice of the only element of a dimension cuts the last one",
        "cupyfuse/torch/rules/shapes.py",
        "            if shape[-1] != length:\n                if rest:",
        "            if rest or shape[-1] != length:\n                if rest and shape[-1] != length:",
        ("tests/torch/test_layers.py", "-k", "test_shapes"),
    ),
    Mutant(
        "equal views have cotangents of their own",
        "cupyfuse/trace/autodiff.py",
        "        node = first.get(node, node)\n",
        "",
        ("tests/torch/test_parts.py", "-k", "one_cotangent"),
    ),
    Mutant(
        "products stay in chains that gain less with them",
        "cupyfuse/torch/graphs/partition.py",
        "    if len(apart) > len(shared):\n",
        "    if False:\n",
        ("tests/torch/test_choice.py", "-k", "between_them"),
    ),
    Mutant(
        "plans are not checked",
        "cupyfuse/plan/build.py",
        "    check_plan(plan, traced.graph.inputs, bound)\n",
        "",
        ("tests/plan/test_soundness.py", "-k", "every_plan_is_checked"),
    ),
    Mutant(
        "steps may read what later ones write",
        "cupyfuse/plan/soundness.py",
        '        if value not in there and value.op != "const":\n',
        "        if False:\n",
        ("tests/plan/test_soundness.py", "-k", "too_early"),
    ),
    Mutant(
        "steps may read what they do not declare",
        "cupyfuse/plan/soundness.py",
        'if operand not in known and operand.op != "const":',
        "if False:",
        ("tests/plan/test_soundness.py", "-k", "not_declare"),
    ),
    Mutant(
        "epilogues may read what their steps do not",
        "cupyfuse/plan/soundness.py",
        "            if value not in known:\n",
        "            if False:\n",
        ("tests/plan/test_soundness.py", "-k", "epilogues"),
    ),
    Mutant(
        "steps may write what is in memory",
        "cupyfuse/plan/soundness.py",
        "        if node in there:\n",
        "        if False:\n",
        ("tests/plan/test_soundness.py", "-k", "doubled"),
    ),
    Mutant(
        "blocks may be given anything",
        "cupyfuse/plan/soundness.py",
        "            if value != (node.shape, node.dtype):\n",
        "            if False:\n",
        ("tests/plan/test_soundness.py", "-k", "blocks"),
    ),
    Mutant(
        "what reads a later product, too, is an epilogue",
        "cupyfuse/plan/schedule/epilogues.py",
        "    if is_needed_before(tail, step, steps):\n        written",
        "    if False:\n        written",
        ("tests/plan/test_epilogues.py", "-k", "steps_before_them"),
    ),
    Mutant(
        "backward passes of other wanted gradients are alike",
        "cupyfuse/torch/chains/matching.py",
        'like = [f"wanted == {name(wanted)}", *(',
        'like = ["True", *(',
        ("tests/torch/test_like_calls.py", "-k", "compare_all"),
    ),
    Mutant(
        "backward passes of other strides are alike",
        "cupyfuse/torch/chains/matching.py",
        'like += [f"{each}.stride() == {name(t.stride())}", f"{each}.shape',
        'like += [f"{each}.shape',
        ("tests/torch/test_like_calls.py", "-k", "compare_all"),
    ),
    Mutant(
        "statistics of 16-bit rows are saved where their products are computed again",
        "cupyfuse/torch/chains/saving.py",
        "bool(inner) or dtypes.ITEMSIZE[rows.dtype] <= 2",
        "bool(inner)",
        ("tests/torch/test_recomputed_products.py", "-k", "one_pass_rounds"),
    ),
    Mutant(
        "products that others depend on are computed again",
        "cupyfuse/torch/chains/saving.py",
        "kept = [p for p in products if p in inner]",
        "kept = []",
        ("tests/torch/test_recomputed_products.py", "-k", "others_depend_on"),
    ),
    Mutant(
        "running statistics are saved as the chain leaves them",
        AUTOGRAD,
        "if backward.may_be_overwritten:",
        "if False:",
        ("tests/torch/test_captured_memory.py", "-k", "before_they_are_updated or views_of_statistics"),
    ),
    Mutant(
        "compilers keep copies of running statistics",
        "cupyfuse/torch/graphs/lowering.py",
        "if not self.call_maker.differentiates:  # `fuse`",
        "if False:  # `fuse`",
        ("tests/torch/test_captured_memory.py", "-k", "before_they_are_updated and operators"),
    ),
    Mutant(
        "gradients that are enabled in inference mode are recorded",
        "cupyfuse/torch/chains/eligibility.py",
        "return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()",
        "return torch.is_grad_enabled()",
        ("tests/torch/test_modes.py", "-k", "enabled_in_inference_mode"),
    ),
    Mutant(
        "arrays for SciPy's results are not written",
        "cupyfuse/trace/numpy/scipy.py",
        "return target._assign_all(result)",
        "return result",
        ("tests/trace/test_scipy_functions.py", "-k", "arrays_for_results_are_written"),
    ),
    Mutant(
        "permuted inputs are read from copies past a change of grad mode",
        "cupyfuse/torch/graphs/lowering.py",
        "if self.captured.operations[item].target in SWITCHES:",
        "if False:",
        ("tests/torch/test_layouts.py", "-k", "without_gradients"),
    ),
    Mutant(
        "inputs that may share memory with one that is written to are read from copies",
        "cupyfuse/torch/graphs/written_memory.py",
        "    return written.union(merged_inputs(captured))",
        "    return written",
        ("tests/torch/test_layouts.py", "-k", "share_its_memory"),
    ),
    Mutant(
        "kernels convert reals to complex numbers",
        "cupyfuse/trace/changes.py",
        "if dtypes.is_opaque(self._node.dtype) and new._node.dtype != self._node.dtype:",
        "if False:",
        ("tests/trace/test_parts_and_bits.py", "-k", "host and parts_of_complex"),
    ),
    Mutant(
        "float is replaced where it is a type",
        "cupyfuse/api/call_sites.py",
        "if name in names and is_called(instructions, k)]",
        "if name in names]",
        ("tests/trace/test_python_numbers.py", "-k", "used_as_types"),
    ),
    Mutant(
        "np.float32 is replaced where it is a type",
        "cupyfuse/api/code.py",
        "return sys.version_info >= (3, 11) and bool((before.arg or 0) & 1)",
        "return True",
        ("tests/trace/test_scalar_types.py",),
    ),
    Mutant(
        "flags of arrays that are not known are False",
        "cupyfuse/trace/memory.py",
        "        if found is None:\n            fail(",
        "        if False:\n            fail(",
        ("tests/trace/test_probing.py",),
    ),
    Mutant(
        "shapes may depend on a number that a library step takes",
        "cupyfuse/trace/library.py",
        "if depend_on_numbers(results,",
        "if False and depend_on_numbers(results,",
        ("tests/api/test_numbers.py", "-k", "shapes_depend"),
    ),
    Mutant(
        "library steps of numbers run once for bound arguments",
        "cupyfuse/plan/prepacking.py",
        " or (node.call is not None and node.call.numbers)",
        "",
        ("tests/api/test_numbers.py", "-k", "bound_arguments_and_a_number"),
    ),
    Mutant(
        "the number of a new name loses what its instruction has no room for",
        "cupyfuse/api/call_sites.py",
        "return _argument(load, number) <= 255 or (load.arg or 0) > 255",
        "return True",
        ("tests/trace/test_python_numbers.py", "-k", "many_names"),
    ),
    Mutant(
        "bound objects that a free argument holds, too",
        "cupyfuse/api/match_writer.py",
        "if self._same_arrays:\n                raise",
        "if False:\n                raise",
        ("tests/api/test_objects.py", "-k", "free_and_bound"),
    ),
    Mutant(
        "attributes that code compares by identity, under a computed name",
        "cupyfuse/api/walk.py",
        " or is_singular(value)",
        "",
        ("tests/api/test_objects.py", "-k", "compared_by_identity"),
    ),
    Mutant(
        "the same, in generated code",
        "cupyfuse/api/match_writer.py",
        'self._refuse_if(f"{self.constant(is_singular)}({source})")',
        "pass",
        ("tests/api/test_objects.py", "-k", "compared_by_identity"),
    ),
    Mutant(
        "calls of plans that were forgotten, direct calls",
        "cupyfuse/api/inline_cache.py",
        "calls.keep(self._runnables)",
        "pass",
        direct("forgotten"),
    ),
    Mutant(
        "calls that are described again and again",
        "cupyfuse/api/inline_cache.py",
        "runnable.found < _FOUND or ",
        "",
        direct("again_and_again"),
    ),
    Mutant(
        "a cache that is cleared while a call is described",
        "cupyfuse/api/inline_cache.py",
        "if self._calls is calls:\n            self.direct = calls.recognize",
        "self.direct = self._calls.recognize",
        direct("cleared"),
    ),
    Mutant(
        "variables that change while a call is described",
        "cupyfuse/api/direct_calls.py",
        "(None if around is None else around.key) != known.around_key or ",
        "",
        direct("variables_may_change"),
    ),
    Mutant(
        "Python's lock held in a launch that waits, compiled launcher",
        LAUNCHER,
        "Py_BEGIN_ALLOW_THREADS\n                refused = ((LaunchKernel)(uintptr_t)steps[0].a)(&config, "
        "(void*)(uintptr_t)kernel.function, arguments, NULL);\n                Py_END_ALLOW_THREADS",
        "refused = ((LaunchKernel)(uintptr_t)steps[0].a)(&config, (void*)(uintptr_t)kernel.function, arguments, NULL);",
        compiled("blocks"),
    ),
    Mutant(
        "defaults replaced by another thread, direct calls",
        "cupyfuse/api/direct_calls.py",
        "if known.match((*values, *given_around)) is None:",
        "if False:",
        direct("another_thread"),
    ),
    Mutant(
        "structs in use for another launch",
        LAUNCH_TEXT,
        '"    buffers = local.free.pop()',
        '"    buffers = local.free[-1]',
        (LAUNCHES, "-k", "within_a_launch"),
    ),
    Mutant(
        "threads that keep to the first way of launching",
        LAUNCH_TEXT,
        '"    finish()"',
        '"    pass"',
        (LAUNCHES, "-k", "first_launch"),
    ),
    Mutant(
        "addresses without their offsets",
        LAUNCH_TEXT,
        "f' + {start}' if start else ''",
        "''",
        (LAUNCHES, "-k", "each_launch or in_its_order"),
    ),
    Mutant(
        "a stream of an earlier launch",
        "cupyfuse/cuda/driver.py",
        "config.stream = stream",
        "config.stream = config.stream or stream",
        (LAUNCHES, "-k", "own_streams"),
    ),
    Mutant("rows of the first block", TYPES, "block.quotient(number) * apart", "0 * apart", repeated("a_mask")),
    Mutant("pairs in their own places", TYPES, "V == 1 ? v : v ^ 1", "v", swapped("float32-contiguous")),
    Mutant(
        "one of a pair in its own place",
        "cupyfuse/cuda/parameters.py",
        "({vec} == 1 ? {self.col('col')} : col)",
        "col",
        swapped("offset"),
    ),
    Mutant(
        "pairs in two packs",
        "cupyfuse/cuda/config.py",
        " or any(p.swapped for p in program.parameters)",
        "",
        ("tests/cuda/test_swapped_pairs.py", "-k", "odd_addresses and host"),
    ),
    Mutant("rows of one round", TYPES, "(here - inner.quotient(here) * rows) *", "here *", repeated("slope")),
    Mutant(
        "rows that come once",
        TYPES,
        "times.quotient(number)",
        "number",
        repeated("slope_for_each_head_of_each"),
    ),
    Mutant(
        "rows beyond 32 bits",
        TYPES,
        "row / block.value * apart + row / times.value % inner.value * between + row % times.value * within",
        "row",
        ("tests/cuda/test_host_cuda.py", "-k", "come_again"),
    ),
    Mutant(
        "one row of elements where rows come again",
        "cupyfuse/engines/kernel_launch.py",
        "(p.extent in (FULL, SCALAR) and not p.repeats)",
        "p.extent in (FULL, SCALAR)",
        repeated("elements and a_mask"),
    ),
    Mutant(
        "copies joined that come again otherwise",
        "cupyfuse/plan/schedule/repeats.py",
        'operand.op != "strided" and ',
        "",
        repeated("several_rounds"),
    ),
    Mutant(
        "rows joined that are reduced",
        "cupyfuse/plan/schedule/repeats.py",
        "if not _joins(reader, copy, inner) or reader in changed:",
        "if reader in changed:",
        repeated("joined and of_another_reader"),
    ),
    Mutant("rows in blocks without their own stride", TYPES, "rest * within", "rest", blocked("programs")),
    Mutant(
        "shifted vectors of rows in another order",
        "cupyfuse/cuda/config.py",
        " and (in_order or all(n % vec == 0 for n in read))",
        "",
        blocked("between_vectors"),
    ),
    Mutant("halves of two tensors as pairs", PAIRS, "first.whole is not second.whole or ", "", pairs("no_swap")),
    Mutant(
        "halves in their own order as pairs", PAIRS, " or (first.start, second.start) != (1, 0)", "", pairs("no_swap")
    ),
    Mutant(
        "pairs of memory that is written to",
        PAIRS,
        "any(map(memory.is_written_to, (whole, *halves))) or ",
        "",
        pairs("written_to"),
    ),
    Mutant("pairs whose memory is shared", PAIRS, "list(stack.users) != [node]", "False", pairs("share_memory")),
    Mutant(
        "pairs under another gradient mode",
        PAIRS,
        "is_switched(min(halves), node)",
        "False",
        pairs("without_gradients"),
    ),
    Mutant("pairs of two rows", PAIRS, "example_of(source).shape[-1] % 2 == 0", "True", pairs("no_swap")),
    Mutant("pairs of integers", PAIRS, "not example_of(whole).is_floating_point() or ", "", pairs("integers")),
    Mutant(
        "vectors taken from the pack that they begin in",
        TYPES,
        "(reinterpret_cast<u64>(from) + bytes - 1) & ~",
        "reinterpret_cast<u64>(from) & ~",
        rows("elsewhere_in_a_pack and 251 and row_gap and row_stream and softmax"),
    ),
    Mutant(
        "vectors taken from a whole number of words",
        TYPES,
        "offset % 4 * 8",
        "0",
        rows("elsewhere_in_a_pack and 251 and row_gap and row_block-64x8 and softmax"),
    ),
    Mutant(
        "packs where those that are read begin",
        "cupyfuse/cuda/emit.py",
        "min(full, key=lambda p: (not p.written, p.repeats))",
        "full[0]",
        rows("elsewhere_in_a_pack and 251 and row_gap and row_stream and softmax"),
    ),
    Mutant(
        "vectors whatever the row stride",
        "cupyfuse/engines/kernel_launch.py",
        "strides += [place.row_stride] if self.rows > 1 else []",
        "pass",
        kernels("row_gap"),
    ),
    Mutant(
        "a grid one block short",
        "cupyfuse/engines/kernel_launch.py",
        "blocks = -(-rows // (config.threads // config.group * config.rows))",
        "blocks = rows // (config.threads // config.group * config.rows)",
        kernels("affine_softmax-70x5-float32"),
    ),
    Mutant(
        "partial totals in too little memory",
        "cupyfuse/engines/kernel_launch.py",
        "return self.config.shares * count * state_size(reducing)",
        "return self.config.shares * count * 4",
        kernels("column_reductions-600x5-float32"),
    ),
    Mutant(
        "collapsed sums that are not repaired",
        "cupyfuse/cuda/expressions.py",
        'self.line(f"if (!isfinite({name})) {{")',
        'self.line("if (false) {")',
        kernels("collapsed"),
    ),
    # What is computed in another order, or again, and what that costs
    Mutant(
        "operations that are reordered for no chain",
        "cupyfuse/torch/backend.py",
        "        kept |= in_vain\n",
        "        break\n",
        ("tests/torch/test_permuted_rows.py", "-k", "keeps_its_order or keep_their_order"),
    ),
    Mutant(
        "inserted views that cost nothing",
        "cupyfuse/torch/cost/decision.py",
        "EAGER_VIEW * views",
        "EAGER_VIEW * 0",
        ("tests/torch/test_cost.py", "-k", "inserted_views"),
    ),
    Mutant(
        "a host that counts where the GPU is the bottleneck",
        "cupyfuse/torch/cost/estimate.py",
        "min(0.0, max(self.pytorch.host, self.fused.gpu) - self.fused.host)",
        "saved",
        ("tests/torch/test_cost.py", "-k", "the_rule"),
    ),
    Mutant(
        "gradients of repeated rows that are rounded one by one",
        "cupyfuse/trace/autodiff.py",
        "if node in gathered and node in repeated:",
        "if False:",
        ("tests/torch/test_repeated_rows.py", "-k", "added_up_before"),
    ),
    Mutant(
        "elements at numbers that are views",
        "cupyfuse/trace/indexing.py",
        " and not _is_of_element(x, items):",
        ":",
        ("tests/trace/test_rows_at_numbers.py", "-k", "element"),
    ),
    Mutant(
        "complex numbers that are left to kernels",
        "cupyfuse/plan/schedule/__init__.py",
        "pieces_in_memory(copy_opaque_broadcasts(graph))",
        "pieces_in_memory(graph)",
        ("tests/trace/test_library_steps.py", "-k", "cannot_read and host"),
    ),
    *GEMM_MUTANTS,
    # What only a GPU executes
    Mutant(
        "PTX maximum that forgets NaN",
        FUNCTIONS,
        "max.NaN.f32",
        "max.f32",
        ("tests/cuda/test_kernels.py", "-k", "cuda and special"),
        gpu=True,
    ),
    Mutant(
        "PTX minimum that forgets NaN",
        FUNCTIONS,
        "min.NaN.f32",
        "min.f32",
        ("tests/cuda/test_kernels.py", "-k", "cuda and special"),
        gpu=True,
    ),
    Mutant(
        "PTX bfloat16 that is cut off",
        TYPES,
        "cvt.rn.bf16x2.f32",
        "cvt.rz.bf16x2.f32",
        ("tests/cuda/test_kernels.py", "-k", "cuda and ties"),
        gpu=True,
    ),
    Mutant(
        "PTX float16 that is cut off",
        TYPES,
        "cvt.rn.f16.f32",
        "cvt.rz.f16.f32",
        ("tests/cuda/test_kernels.py", "-k", "cuda and ties"),
        gpu=True,
    ),
    Mutant(
        "32-bit divisions of more elements",
        "kernels_cu/elementwise.cu",
        "total < (i64(1) << 31)",
        "true",
        (ON_GPU, "-k", "32_bit_number"),
        gpu=True,
    ),
    Mutant(
        "a product with a transposed operand taken as it is",
        "cupyfuse/cuda/gemm.py",
        "return _TRANSPOSED, max(self.col_stride",
        "return NORMAL, max(self.col_stride",
        (ON_GPU, "-k", "products_of_all_layouts"),
        gpu=True,
    ),
)
