"""Execute the plan: one reader per rank fetches ahead, builders turn bytes into batches, and batches leave in order.

Threads and their hand-overs belong here. ``plan`` decides what is fetched when, and ``batches`` how a batch is built;
the engine decides neither, and knows no epochs.
"""
