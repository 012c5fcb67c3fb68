"""Loop over epochs of our own datasets, with or without an index; ``torch_datasets`` loops over those of others.

Epochs, positions and states belong here. ``plan`` decides what is read when, and the engine reads it. A loop moves no
bytes.
"""
