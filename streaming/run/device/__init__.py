"""Copy batches to an accelerator ahead of time, on a side stream.

This folder knows batches and the device, but not the origin of batches.
"""
