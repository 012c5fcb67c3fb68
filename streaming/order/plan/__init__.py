"""Decide which rank reads which samples, and when. Pure: no I/O, no clock, no threads."""
