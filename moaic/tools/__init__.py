"""Tools beside programs: `moai-smi`, `moai-switch-model`, and the checks of `moaic doctor`. None loads torch."""
