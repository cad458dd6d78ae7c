"""Tables of predictions, and of how accurate they were."""
