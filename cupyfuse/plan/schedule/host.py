"""Host times, for a host on which a small operation takes PyTorch eager 5 us; on a slower one all of them grow alike.

On the host of an H200 that takes 8 us for such an operation, a product by cuBLAS takes 17 us, 12 of them inside
`cublasGemmEx` or `cublasLtMatmul`, and a launch of ours 4.
"""

from __future__ import annotations

CALL = 5e-6  # a plan or a chain: finding it, allocating its results
PRODUCT = 10e-6  # a product by cuBLAS: its handle, its mode, its call
LAUNCH = 2.5e-6  # any other launch
