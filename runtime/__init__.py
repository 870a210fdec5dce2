"""The runtime: controller, workers, their protocol, compiled programs and kernels; the reference interpreter."""
