"""Configs: frozen, validating dataclasses that say what to run and where, and their text forms. No torch."""
