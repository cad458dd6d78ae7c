"""Step time by formula: the kernels of a step, how long each takes on a calibrated machine, and what the host and messages add."""
