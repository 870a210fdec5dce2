"""The language: types, ops with their rules, text, verifier. Imports no torch."""
