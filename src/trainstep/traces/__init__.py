"""Reads what profilers and torch's allocator wrote: events, their places and classes, what the host did meanwhile. No torch."""
