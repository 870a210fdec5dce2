"""From compute functions to code: through torch op by op, by Inductor, for GPUs that need not be here."""
