"""The virtual device `moai`: PyTorch's PrivateUse1 in Python, in front of the runtime's accelerator."""
