"""A script of somebody that is started again, changed from outside, and compared with itself: `--apply`, and proofs of scripts."""
