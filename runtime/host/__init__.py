"""The host: its GPUs, memory and cores, the flavors that they allow, the user's folders, the running jobs."""
