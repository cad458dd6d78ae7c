"""Measures anyone's training script while it runs: hooks that find its steps and phases, and one step inspected now and then."""
