"""The host: its GPUs, memory and cores, the flavors that these allow, the user's folders, the jobs that run."""
