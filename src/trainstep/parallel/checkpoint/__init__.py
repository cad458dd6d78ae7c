"""Checkpoints that load on any number of ranks: save and load, files, metadata."""
