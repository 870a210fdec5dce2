"""The layout solver: strategies per op, their costs, and an integer program that chooses among them."""
