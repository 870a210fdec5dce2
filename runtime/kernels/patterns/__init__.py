"""Where kernels take the place of ops: patterns, and the rule of each kernel."""
