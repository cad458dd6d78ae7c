"""A measured step as a budget: what the hardware needs at least, then each excess with its cause, ranked."""
