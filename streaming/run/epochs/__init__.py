"""Manage the sequence of epochs: the position, the iterator that users get, and the stall watchdog. Reads no data."""
