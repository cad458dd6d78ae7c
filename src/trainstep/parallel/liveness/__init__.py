"""Detects ranks that died or keep the others waiting: a watch on each rank, and a desk on rank 0."""
