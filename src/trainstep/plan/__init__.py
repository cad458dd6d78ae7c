"""Predicts messages and memory from configs alone, before anything runs. No torch."""
