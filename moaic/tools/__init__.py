"""What people ask beside their programs: switching flavors, looking at accelerators, checking an installation."""
