"""Timed training steps in a report: phases, warm-ups, comparisons, before and after, answer."""
