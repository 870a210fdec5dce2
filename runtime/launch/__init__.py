"""Starting workers, on this host and on others; no torch."""
