"""Immutable records of measured cells, the store that keeps them, and what is computed from them at read time. No torch."""
