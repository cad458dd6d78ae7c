"""Gates in a report: the answer, the tables and the Markdown comment of two compared versions."""
