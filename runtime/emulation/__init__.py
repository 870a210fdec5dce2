"""A GPU that is not here: its kernels, as far as Triton's text, are interpreted on tensors of the host."""
