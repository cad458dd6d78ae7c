"""Changes a user's script from outside and compares it with itself: for `--apply`, and for proofs of scripts."""
