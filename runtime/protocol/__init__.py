"""What crosses between controller and workers: commands, the wire, and the data that commands carry."""
