"""Numerics in a report: errors and costs of precisions as tables, answer and page."""
