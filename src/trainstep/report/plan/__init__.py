"""Tables of predictions, and of what became of them."""
