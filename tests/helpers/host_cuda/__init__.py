"""Kernels on a CPU: what NVRTC gets for a GPU, compiled by g++ and run thread by thread. See README.md."""
