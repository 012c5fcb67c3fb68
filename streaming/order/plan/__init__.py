"""Decide which rank reads what, and when. Pure: no I/O, no clock, no threads."""
