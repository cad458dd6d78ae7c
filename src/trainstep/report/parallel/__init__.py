"""Parallel strategies and collectives in a report: tables, page, answers."""
