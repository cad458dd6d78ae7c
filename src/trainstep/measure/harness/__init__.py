"""How cells run: their processes, requests and answers, order, failures, sweeps and Slurm."""
