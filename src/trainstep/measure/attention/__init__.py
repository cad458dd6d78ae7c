"""Measures attention by itself: implementations side by side, tiles of one kernel, correctness."""
