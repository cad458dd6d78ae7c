"""What was seen: immutable records, the store that keeps them, and what is computed from them when read. No torch."""
