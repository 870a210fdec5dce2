"""The kernels themselves, one file each, with the same in plain PyTorch."""
