"""What people read, made from records alone: tables, charts, one self-contained page. No torch."""
