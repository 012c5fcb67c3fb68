"""Hold what a user asks of a loader, as values that are checked where they are made.

What becomes of them on a machine, in a mesh and with a dataset is decided by the loops; nothing here opens anything.
"""
