"""The model and one training step of it; `build.py` shows how the parts fit together."""
