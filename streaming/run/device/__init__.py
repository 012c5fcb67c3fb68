"""Copy batches to an accelerator ahead of time, on a side stream.

Knows batches and the device, but not where batches come from.
"""
