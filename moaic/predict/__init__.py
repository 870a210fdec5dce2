"""What a model would take on machines that need not be here: the parameter guide, kernels made for absent GPUs."""
