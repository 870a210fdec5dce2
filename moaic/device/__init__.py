"""The virtual device `moai`: PyTorch's PrivateUse1 device in Python, on top of the runtime's accelerator."""
