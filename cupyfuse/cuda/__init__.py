"""Everything that writes, compiles or launches CUDA: emission, NVRTC, cuBLAS."""
