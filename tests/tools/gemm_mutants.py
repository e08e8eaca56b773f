"""Ways to break 16-bit products with epilogues, beside their barriers (`barriers.py`)."""

from __future__ import annotations

from mutant import Mutant

KERNEL, RING, EPILOGUE = "kernels_cu/gemm.cu", "kernels_cu/ring.cuh", "kernels_cu/gemm_epilogue.cuh"
RESULTS = "kernels_cu/gemm_results.cuh"
EMITTED, LAUNCH = "cupyfuse/cuda/fused_gemm.py", "cupyfuse/engines/product_launch.py"
CUT, PADDING = "cupyfuse/plan/schedule/epilogues.py", "cupyfuse/plan/schedule/padding.py"


def fused(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_fused_gemm.py", "-k", f"host and ({select})")


def padded(select: str) -> tuple[str, ...]:
    return ("tests/cuda/test_padded_rows.py", "-k", f"host and ({select})")


LAUNCHED = ("tests/engines/test_launched_plans.py", "-k", "results_at_any")
# Clusters of two, more tiles than blocks, more of k than stages, rows and columns left over.
PAIRS = fused("more_tiles and two and 256by2")
REDUCED = fused("test_tails and 37 and several")
WRITTEN = fused("test_tails and 37 and two")
LENGTHS, NARROW = fused("rows_that_begin and bfloat16"), fused("narrow_results")
OUT, SIZES = fused("arrays_that_begin and out"), fused("every_size and 128by2")
WIDE = fused("test_tails and 263 and several")
ALTERNATING = fused("more_tiles and two and 128by2alternating")

GEMM_MUTANTS: tuple[Mutant, ...] = (
    # Barriers that wait for too little
    Mutant(
        "a stage handed back to its own block alone",
        KERNEL,
        "    if (Shape::cluster == 1) {\n        if (lane == 0) {",
        "    if (true) {\n        if (lane == 0) {",
        PAIRS,
    ),
    Mutant(
        "a stage that is empty for one block",
        KERNEL,
        "consumer_warps = consumers / 32 / parts * Cluster",
        "consumer_warps = consumers / 32 / parts",
        PAIRS,
    ),
    Mutant(
        "a cluster that begins apart",
        KERNEL,
        "        __syncthreads();\n    } else {\n        cluster_sync();",
        "        __syncthreads();\n    } else {\n        __syncthreads();",
        fused("every_order and shared"),
    ),
    Mutant(
        "warpgroups that do not take turns",
        KERNEL,
        "            take_turn();\n            if (tile >= order.count())",
        "            if (tile >= order.count())",
        ALTERNATING,
    ),
    Mutant("a turn's stages that are not skipped", RING, "stage += stages;", "stage += 0;", ALTERNATING),
    Mutant("rounds of skipped stages", RING, "parity ^= stage / Stages & 1;", "parity ^= 0;", ALTERNATING),
    Mutant("a stage that two arrivals fill", RING, "+ s * 16, 1);", "+ s * 16, 2);", PAIRS),
    Mutant("a ring without turns", RING, "        parity ^= stage == 0;\n", "", PAIRS),
    # Operands
    Mutant(
        "columns that one block copies",
        KERNEL,
        "static_cast<int>(first_col) + static_cast<int>(rank) * share",
        "static_cast<int>(first_col)",
        PAIRS,
    ),
    Mutant("columns that go to one block", KERNEL, "(1 << Shape::cluster) - 1", "1 << (Shape::cluster - 1)", PAIRS),
    Mutant(
        "columns in the other block's place",
        KERNEL,
        "ring.b() + rank * (share",
        "ring.b() + (rank ^ 1) * (share",
        PAIRS,
    ),
    Mutant("rows that both blocks compute", KERNEL, "row += rank * Shape::rows + (", "row += (", PAIRS),
    Mutant("half of the turned rows", KERNEL, "i < Shape::rows / 64", "i < 1", fused("turned and left and 256by2")),
    Mutant(
        "half of the turned columns", KERNEL, "i < share / 64", "i < share / 128", fused("turned and right and 256by2")
    ),
    Mutant(
        "an operand's address in the cluster, in its descriptor",
        "kernels_cu/tensor_cores.cuh",
        "(address & 0x3ffff) >> 4",
        "address >> 4",
        fused("turned and right and 256by2"),
    ),
    Mutant(
        "a turned operand's next columns",
        KERNEL,
        "next_b = TurnedB ? 128 : 2",
        "next_b = 2",
        fused("turned and right and 256by2"),
    ),
    Mutant(
        "turned rows far apart",
        KERNEL,
        "transposed_operand_at(ring.b(), box)",
        "transposed_operand_at(ring.b(), 2 * box)",
        fused("turned and right and 256by2"),
    ),
    Mutant("a stage of k left out", KERNEL, "(p.depth + 63) / 64", "p.depth / 64", PAIRS),
    Mutant("sums of two tiles", KERNEL, "block > 0 || i > 0);", "1);", PAIRS),
    # Epilogues
    Mutant("a chunk of another one's sums", "kernels_cu/tensor_cores.cuh", "sums[Next * Held + i]", "sums[i]", WIDE),
    Mutant("columns beyond the last", EPILOGUE, "return Whole || offset(i) < left;", "return true;", REDUCED),
    Mutant("rows beyond the last", RESULTS, "down < rows && across + V <= cols", "across + V <= cols", WRITTEN),
    Mutant("results beyond a row", RESULTS, "down < rows && across + V <= cols", "down < rows", LENGTHS),
    Mutant("boxes at any address", RESULTS, "if (reinterpret_cast<u64>(to) % 16 == 0) {", "if (true) {", OUT),
    Mutant("rows beyond the last, by elements", RESULTS, "at_row < m && at_col < n", "at_col < n", OUT),
    Mutant("columns beyond the last, by elements", RESULTS, "at_row < m && at_col < n", "at_row < m", OUT),
    Mutant("pieces in another order", RESULTS, ">> 7 & (pieces - 1)", ">> 7 & (pieces / 2 - 1)", SIZES),
    Mutant("a result in another one's place", RESULTS, "* first) {}", "* 0) {}", SIZES),
    Mutant("a panel that is still read", RESULTS, "until_read<Shape::panels - 1>", "until_read<Shape::panels>", SIZES),
    Mutant("one panel for all", RESULTS, "used % Shape::panels *", "used * 0 *", SIZES),
    Mutant("stores before what they copy", RESULTS, "        stores_fence();\n", "", SIZES),
    Mutant("stores that nobody waits for", KERNEL, "    stores_wait();\n", "", SIZES),
    Mutant("pairs at odd places", RESULTS, "if (shift % V == 0) {", "if (true) {", LENGTHS),
    Mutant("ends of panels that are lost", RESULTS, "if (down < 16) {", "if (down < 8) {", LENGTHS),
    Mutant("ends of panels that go on", RESULTS, "if (!is_last && !shifts.aligned) {", "if (false) {", LENGTHS),
    Mutant("packs before a tile", RESULTS, "across >= 0 || !is_first)", "true)", NARROW),
    Mutant("elements behind packs", RESULTS, "is_last && down < rows", "false && down < rows", NARROW),
    Mutant("packs that no panel has", RESULTS, "(whole < Panel ? whole : Panel)", "whole", LENGTHS),
    Mutant("values of the chunk before", EPILOGUE, "        columns = next;\n", "", SIZES),
    Mutant("values beyond the last column", EPILOGUE, "col + Chunk <= p.cols", "true", SIZES),
    Mutant(
        "a panel where its last chunk is", EPILOGUE, "first_row, chunk_col - across,", "first_row, chunk_col,", SIZES
    ),
    Mutant("a panel that no chunk ends", EPILOGUE, "|| chunk_col + chunk >= n;", "|| false;", SIZES),
    Mutant(
        "a first panel of one chunk",
        EPILOGUE,
        "c * chunk < Shape::panel, is_last",
        "c == 0, is_last",
        ("tests/cuda/test_scaled_gemm.py", "-k", "host and scale and odd-128by1"),
    ),
    Mutant(
        "totals of every tile in one place", EPILOGUE, "* p.shares + first_col / Shape::columns]", "* p.shares]", WIDE
    ),
    Mutant(
        "guards that fail",
        "kernels_cu/stages.cuh",
        "found = compute_exact<P, V>(p, tile, row, col, r, found);",
        "",
        fused("guards"),
    ),
    Mutant("totals of one lane", EPILOGUE, "                Lanes<4>().reduce(totals[h]);\n", "", REDUCED),
    Mutant(
        "totals of the first tiles",
        "kernels_cu/stages.cuh",
        "share += team.size()",
        "share += p.shares",
        fused("wide_rows"),
    ),
    Mutant(
        "a product that is not rounded with its result",
        "cupyfuse/cuda/program.py",
        "Parameter(PRODUCT, node, FULL, self.storage[node], False)",
        'Parameter(PRODUCT, node, FULL, "float32", False)',
        fused("read_again"),
    ),
    Mutant(
        "a second result over the first",
        "cupyfuse/cuda/staged_results.py",
        "At<{sum(sizes[:k])}>()",
        "At<0>()",
        WRITTEN,
    ),
    # Launches
    Mutant(
        "a result's first tensor map",
        LAUNCH,
        "words = self._maps.get(address)",
        "words = next(iter(self._maps.values()), None)",
        LAUNCHED,
    ),
    Mutant(
        "results by their length, wherever rows are padded",
        LAUNCH,
        "MatrixBoxes(lines, length, place.row_stride * itemsize,",
        "MatrixBoxes(lines, length, length * itemsize,",
        padded("what_a_product_writes and 520 and 256by1"),
    ),
    Mutant("operands wherever they begin", LAUNCH, "if address % ALIGNMENT:", "if False:", fused("anywhere")),
    Mutant(
        "pairs wherever they begin",
        "cupyfuse/engines/kernel_launch.py",
        "self.aligned_vec(addresses, widest.vec)",
        "widest.vec",
        fused("anywhere"),
    ),
    Mutant(
        "totals in too little memory",
        "cupyfuse/plan/schedule/tiles.py",
        "return rows * -(-columns // tiles_of(step, processors).columns)",
        "return -(-columns // tiles_of(step, processors).columns)",
        REDUCED,
    ),
    Mutant(
        "a second stage that computes the first again",
        CUT,
        "later = [n for n in tail.nodes if stages[n] > 0]",
        "later = [n for n in tail.nodes if stages[n] > 1]",
        fused("test_tails and softmax and 37"),
    ),
    # Padded rows
    Mutant(
        "results whose padded rows end in part of a pack",
        RESULTS,
        "shifts.aligned ? is_last && cols % V != 0 : is_first || is_last",
        "!shifts.aligned && (is_first || is_last)",
        padded("what_a_product_writes and 131 and 256by1"),
    ),
    Mutant(
        "padded results",
        PADDING,
        "if value in results or not may",
        "if not may",
        padded("as_it_lies and result"),
    ),
    Mutant(
        "padded values that are reshaped",
        PADDING,
        'any(view.op in ("reshape", "repeat") for view in view_chain(read))',
        "False",
        padded("as_it_lies and reshaped"),
    ),
    Mutant(
        "a workspace without padding",
        "cupyfuse/plan/schedule/__init__.py",
        "return value.shape[0] * self.row_stride(value) *",
        "return value.size *",
        padded("a_row_program_writes and 37"),
    ),
    Mutant(
        "padded values placed as if they were not",
        "cupyfuse/engines/cuda.py",
        "plan.scheduled.row_stride(node), 1)",
        "node.shape[1], 1)",
        padded("a_row_program_writes and 37"),
    ),
    Mutant(
        "sums over operands in place",
        "cupyfuse/plan/schedule/workspace.py",
        "return step.by_tiles and source not in map(base_of, step.product.inputs)",
        "return step.by_tiles",
        padded("adds_to"),
    ),
)
