"""What a plan is predicted to take: bytes of memory and seconds per step."""
