"""Read once for ranks that need the same batches, and send the batches to the others.

Groups of ranks, and batches as bytes, are handled here, whatever a batch holds: nothing depends on its contents.
"""
