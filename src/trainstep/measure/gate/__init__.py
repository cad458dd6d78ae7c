"""Runs two versions of a project alternately until their difference is decided: checkouts, runs, times, blocks."""
