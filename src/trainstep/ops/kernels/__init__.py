"""The Triton kernels of the ops that are not attention, with their launchers."""
