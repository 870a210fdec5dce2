"""The kernels, one file each, with a reference in plain PyTorch."""
