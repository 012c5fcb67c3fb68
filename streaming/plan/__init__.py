"""Decide what is read when and by whom. Pure: no I/O, no clock, no threads."""
