"""moaic check: whether a plan computes what its step says, on virtual ranks and on workers."""
