"""Choose which samples of a set are kept: filters, the late columns that they look at, and saved views.

What is read here are index files alone; no bytes of samples.
"""
