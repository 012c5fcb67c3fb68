"""Read once for ranks that need the same batches, and send the batches to the others.

Handles groups of ranks, and batches as bytes; nothing depends on what a batch contains.
"""
