"""The planner: enumerate candidates, compile them in processes of their own, cost them, select one, remember it."""
