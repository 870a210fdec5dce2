"""From a captured step to the programs of a plan: pure functions IR -> IR. No torch, no processes, no devices."""
