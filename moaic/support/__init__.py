"""What all of moaic uses: folders, the log, progress on a terminal, how a program ends."""
