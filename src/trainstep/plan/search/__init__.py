"""Chooses options of a step by its predicted memory and time."""
