"""Loop over epochs: one loop for each kind of dataset, under a common protocol.

Epochs, positions and states belong here. ``plan`` decides what is read when, and the engine reads it: a loop moves no
bytes.
"""
