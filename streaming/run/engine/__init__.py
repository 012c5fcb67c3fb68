"""Execute the plan: one reader per rank fetches ahead, builders turn bytes into batches, delivery keeps their order.

Threads and the handover of work between them belong here. ``plan`` decides what is fetched and when, ``batches`` how
a batch is built. The engine decides neither, and knows nothing of epochs.
"""
