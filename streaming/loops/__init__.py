"""Loop over epochs: one loop for each kind of data set, under one protocol."""
