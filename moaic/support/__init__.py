"""Services for all of moaic: cache folder, log, progress on a terminal, report of the last step, excepthook."""
