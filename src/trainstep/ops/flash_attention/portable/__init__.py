"""Attention kernels in plain Triton, for every GPU and the interpreter."""
