"""Measures what a dtype does to values and gradients, layer by layer."""
