"""Measures one op beside attention by itself: implementations side by side, and their values."""
