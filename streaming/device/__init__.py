"""Feed an accelerator: copy batches ahead on a side stream.

Knows batches and the device; not where batches come from.
"""
