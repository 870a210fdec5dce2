"""Numbers, tables and files of text, in one form everywhere. Imports nothing of moaic: every folder may use it."""
