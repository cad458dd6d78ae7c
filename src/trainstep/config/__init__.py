"""What to run and on what: frozen, validating dataclasses and their text forms. Imports nothing of ours, no torch."""
