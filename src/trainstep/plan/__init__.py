"""Predicts messages, memory and time before anything runs, from configs or a traced model. No torch."""
