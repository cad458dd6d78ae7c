"""Reports for people, made from records alone and without torch: tables, charts, answers, one HTML page."""
