"""Which samples of a set are kept: filters, the late columns that they look at, and views saved under a name.

What is read here are index files alone; no bytes of samples.
"""
