"""trainstep measures, explains and speeds up the training step of a Transformer language model.

Importing it does nothing but this: no torch, no CUDA, no environment. Start at docs/tour.md.
"""

__version__ = "0.1.0"
