"""Choose which samples of a set are kept: filters, the late columns they use, and saved views.

Only index files are read here, no bytes of samples.
"""
