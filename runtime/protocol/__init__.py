"""The protocol between controller and workers: commands, their data, and the wire format."""
