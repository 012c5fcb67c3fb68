"""Choose which samples of a dataset are kept: filters, the late columns they use, and saved views.

Reads index files only, never the bytes of samples.
"""
