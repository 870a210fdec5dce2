"""A worker: one process per device, which runs eager ops and programs as the controller says."""
