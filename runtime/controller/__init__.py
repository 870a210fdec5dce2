"""The controller's side, in the user's process: the accelerator, its buffers, its workers."""
