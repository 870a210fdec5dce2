"""Many devices as one: workers, wire, programs, kernels, memory, status; the reference interpreter."""
