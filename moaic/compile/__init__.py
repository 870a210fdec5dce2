"""The implementation of torch.compile(backend="moai"): a graph becomes a step, the step gets a plan, the plan runs."""
