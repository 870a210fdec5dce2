"""Kernels without a caller in moaic, kept for the benchmark that may show a gain on a GPU.

`catalogue` lists them with the reason for each; `bench/test_kernels.py` and `bench/gpu.py` check and time them together
with the kernels of `runtime/kernels`.
"""
