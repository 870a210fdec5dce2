"""The language: types, ops with their rules, text, verifier. Knows no torch."""
