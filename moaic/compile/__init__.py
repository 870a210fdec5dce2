"""What torch.compile(backend="moai") does: a graph becomes a step, the step a plan, the plan runs."""
