"""moaic's own Triton kernels, each with a reference in plain PyTorch, used where they are faster than Inductor's.

`registry` lists the kernels, `tiles` their tile sizes by GPU, `gains` the shapes at which they were measured to win;
at other shapes they are not used.
"""
