"""Attention kernels for Hopper GPUs only, in Gluon: TMA, warpgroups, wgmma."""
