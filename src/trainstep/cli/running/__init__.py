"""How cells run from the command line: their progress, and the search of the fastest options."""
