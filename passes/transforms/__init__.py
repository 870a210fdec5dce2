"""Rewrites that know nothing of meshes."""
