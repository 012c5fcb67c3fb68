"""Manage the sequence of epochs: the position, the users' iterator, and the stall watchdog. Nothing here reads data."""
