"""Loop over epochs: one loop for each kind of data set, under one protocol.

Epochs, positions and states live here. What is read when is ``plan``'s, how it is read the engine's: a loop moves no
bytes.
"""
