"""From a graph to the selected plan: pure functions IR -> IR. No torch, no processes, no devices."""
