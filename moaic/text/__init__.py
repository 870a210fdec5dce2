"""Numbers and tables as text, in one form everywhere. Imports nothing of moaic, so that every folder may use it."""
