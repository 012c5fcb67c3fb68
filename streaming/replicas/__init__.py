"""Read once for ranks that need the same batches, and hand the batches to the others."""
