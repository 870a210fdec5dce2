"""What hardware and kernels cost: the machine, what a compiler fuses, rings of attention, the optimizer's state."""
