"""Feed an accelerator: copy batches ahead on a side stream."""
