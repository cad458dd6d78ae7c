"""Finds ways of computing that cost more than another with the same result, from the ops of a step."""
