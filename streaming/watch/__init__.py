"""Show what happens: metrics, traces, and options that a measurement found.

Nothing here is needed for a batch.
"""
