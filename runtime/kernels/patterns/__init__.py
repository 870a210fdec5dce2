"""Replacement of ops by kernels: patterns, and the rules of each kernel."""
