"""How a training step is measured: clocks, memory, the profiler, hardware ceilings."""
