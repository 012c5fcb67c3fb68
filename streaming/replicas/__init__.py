"""Read once for ranks that need the same batches, and hand the batches to the others.

Groups of ranks, and batches as bytes, live here; what a batch holds does not matter to them.
"""
