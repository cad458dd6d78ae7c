"""Ways of computing that cost more than another that gives the same, told from the ops of a step."""
