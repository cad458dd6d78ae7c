"""FLOPs and bytes of each op and collective, as functions of ints. The only such formulas; no torch."""
