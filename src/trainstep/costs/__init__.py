"""FLOPs and bytes of every op, collective and parallel strategy, as functions of ints. All such formulas are here. No torch."""
