"""Costs of hardware and kernels: the machine, fusion, FLOPs, ring attention, optimizer state."""
