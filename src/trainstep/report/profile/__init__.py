"""Profiles in a report: tables, sentences, rooflines, answer, page."""
