"""Measures a step on several ranks: time, messages, memory; and collectives by themselves."""
