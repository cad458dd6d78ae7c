"""Runs of anyone's training script in a report: the step by phase, inspected steps, waits, answer."""
