"""Estimates of a plan: peak bytes of memory and seconds per step."""
