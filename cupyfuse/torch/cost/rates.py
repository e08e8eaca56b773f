"""The constants of the cost model, each with its source.

"rows", "gemm", "heads", "torch" and "costs" are reports in benchmarks/results/nvidia-h200, with PyTorch 2.11. Host
times are for a host on which a small operation in a loop takes PyTorch eager 5 us; on a slower one all of them grow
alike (`host`).
`python -m benchmarks costs` compares the estimates with measurements.
"""

from __future__ import annotations

US = 1e-6

# The least gain that counts, as a share of PyTorch's time beside the products that cuBLAS computes either way, whose
# errors cancel; what remains is off by some percent.
MARGIN = 0.10
# By how much the difference of two estimates with products may be off, of the time in PyTorch: costs, 0.94 to 1.02
PRODUCT_ERROR = 0.05
# Host seconds to be saved for each GPU second that is lost: elsewhere in a model the GPU may be the bottleneck.
GPU_WORTH = 4.0

# GPU seconds
# From the end of a kernel to the work of the next, of ours and of PyTorch's: costs, chains of 64 x 256
LAUNCH, EAGER_LAUNCH, INDUCTOR_GAP = 1.3 * US, 2.3 * US, 2.0 * US
REDUCTION = 1.0 * US  # filling and draining a kernel whose blocks wait for a row: heads, tails of 1024 rows
CHECK = 2.0 * US  # a launch that finds prepacked weights unchanged; an estimate

# Shares of the bandwidth
STREAM = 0.88  # pointwise work and reductions along rows: rows, copy and logsumexp at 4.2 of 4.8 TB/s
COLUMNS = {2: 0.65, 4: 0.85}  # reductions down columns, by itemsize: costs, gradients of scales and biases
# Rows and reductions of their columns in one launch, ours (for plans, `_SUMMED` in plan/schedule/times.py) and
# Inductor's: norms, backward passes of 256 to 8192 columns
SUMMED_ROWS, INDUCTOR_SUMMED_ROWS = {2: 0.56, 4: 0.74}, {2: 0.53, 4: 0.64}
# The same in eager, by itemsize: costs, gradients of biases of 4096 x 3072 in 19 and 23 us
EAGER_COLUMNS = {2: 0.3, 4: 0.47}
# Of their rate otherwise, what eager's operations with a vector that is broadcast reach: costs, bias_gelu
EAGER_BROADCAST = {2: 0.33, 4: 0.85}
# PyTorch's copies of permuted dimensions, by itemsize: 8 x 512 x 1500 to 4 x 4096 x 1024 transposed, in 36 to 119 us
TRANSPOSED = {2: 0.14, 4: 0.24}
STRIDED = 0.6  # copies that are steps of a plan; an estimate
HELD_COLUMNS, SHARED = 32768, 0.78  # longer rows, which blocks share: rows, softmax, 0.89 to 0.97 of a copy
INDUCTOR_HELD = 2048  # the longest row that Inductor keeps in registers, or finds in the L1 cache again: costs
INDUCTOR_WIDE = {
    2: (0.42, 0.42),
    4: (0.66, 0.70),
}  # longer rows, by itemsize, written back or only reduced: rows, costs

# Shares of the float32 peak of row work, with reductions and without: rows, softmax bfloat16 at 4.05 TB/s
ALU_ROWS, ALU = 0.33, 0.4

# Products by cuBLAS, by the units that compute them: share of the peak, tile
CUBLAS_SHARE = {"float64": 0.8, "float32": 0.76, "tf32": 0.80, "half": 0.785}  # gemm; float64 is an estimate
# Terms of a sum whose time a tile takes beside its sums: gemm, costs, 0.74 of the peak at K = 768, 0.78 at 8192
CUBLAS_ENDS = {"half": 48}
CUBLAS_TILE = {"float64": (64, 64), "float32": (128, 64), "tf32": (128, 128), "half": (128, 128)}
# Of the time of the further bytes, what a 16-bit product stored in float32 takes longer: 2048 x 2048 x 5632 takes 62.8
# us so, and 60.5 in bfloat16
WIDENED = 0.4
FEW_ROWS = 4  # of 16-bit products with unaligned results: more take a tile's time
# Sums of results of few tiles are split into parts of at least this depth: gemm, 256 x K x 512
SPLIT_DEPTH, SPLIT_K = 256, 3.0 * US

# Of an operand's split down its columns, the time over one along rows; and for each element of a product from splits,
# the bytes whose time its end takes: gemm, and costs of float32 in training
SPLIT_COLUMNS, SPLIT_END = 2.2, 8.0
# What the schedule's estimate of our 16-bit product has for its start, which other work in the queue hides (costs).
QUEUED = 3.5 * US

# Host seconds, within models: a chain, or an operation, finds other code in the caches there. In twelve models on an
# H200, those of one row launch take 10 to 16 us there, for 7.5 in a loop of the same call; a small operation of eager's
# takes 6, for 5. Plans are scheduled with times in a loop, `plan.schedule.host`'s.
IN_A_LOOP = 5.0 * US  # a small operation of eager's in a loop, by which hosts are compared
CALL, OUR_LAUNCH, OUR_PRODUCT = 8.0 * US, 6.0 * US, 18.0 * US
FUNCTION = 40.0 * US  # a node of autograd: sigmoid times x in EfficientNet takes 31 to 36 us forward, 27 to 33 backward
# A graph between hooks of `fully_shard`, which Dynamo enters and leaves: distributed, bfloat16 on two H100s
HOOKED_GRAPH = 300.0 * US
# A graph that is one of several in a call: its guards, and what runs in Python around it. A BART of 3 + 3 small layers
# takes a CPU 3.5 ms in 12 graphs without chains, 1.75 in eager
PART_OF_CALL = 150.0 * US
EAGER = 6.0 * US  # an operation that launches one kernel
EAGER_PRODUCT = 13.0 * US
EAGER_VIEW = 2.0 * US
EAGER_GRADED = 5.0 * US  # what autograd adds to an operation, and once more to its backward
# Of their times in a loop, 4 and 9 us, as much more as ours and eager's take within models; not measured there
INDUCTOR_LAUNCH = 7.0 * US
INDUCTOR_PRODUCT = 13.0 * US
