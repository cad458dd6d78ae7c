"""Attention and its tiles in a report: rows, tables, charts, page, answers."""
