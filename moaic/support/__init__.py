"""What all of moaic uses: units, folders, the log, progress on a terminal, how a program ends."""
