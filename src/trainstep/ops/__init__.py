"""The mathematics of a step, one op a file. Uses nothing of ours but costs and spans, so it can be lifted out alone."""
