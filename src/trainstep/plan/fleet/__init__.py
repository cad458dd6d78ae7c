"""Predicts the time of a step on many nodes: topology, collectives by level, streams and links, stragglers."""
