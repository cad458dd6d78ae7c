"""Ops beside attention in a report: rows, tables, page, answer."""
