"""Predictions for machines that need not be present: the parameter guide, and kernels compiled for absent GPUs."""
