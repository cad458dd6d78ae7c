"""Measures what holds the memory of a step: the allocator's history, the ledger, memory outside the allocator."""
