"""Layouts: one mesh axis or loop axis is put into a module by each pass."""
