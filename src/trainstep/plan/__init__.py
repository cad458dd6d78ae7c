"""What should happen: predicted from configs alone, before anything runs. No torch."""
