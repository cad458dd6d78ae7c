"""Run something and write down what happened. The driving side imports no torch: a cell's own process does."""
