"""Loop over epochs of our own datasets, with an index or without; ``ordinary`` does so for those of others.

Epochs, positions and states belong here. ``plan`` decides what is read when, and the engine reads it: a loop moves no
bytes.
"""
