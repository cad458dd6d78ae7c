"""A model and one step of it. `build.py` shows how the parts meet."""
