"""Triton kernels of our own, for where they beat what Inductor writes: one file each, with the same in plain PyTorch.

`registry` lists them, `tiles` says how each is cut for a GPU. Nothing here runs until something launches it: the table
of measured gains, not hope, says where a kernel is worth using.
"""
