"""Kernels without a caller in moaic: kept beside the benchmark that can show on a GPU which of them to promote.

`catalogue` lists them with the reason for each; `bench/test_kernels.py` and `bench/gpu.py` check and time them together
with the kernels of `runtime/kernels`.
"""
