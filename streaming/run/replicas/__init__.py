"""Read once for ranks that need the same batches, and send the batches to the others.

This folder handles groups of ranks, and batches as bytes. Nothing depends on the content of a batch.
"""
