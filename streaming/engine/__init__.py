"""Run the plan: one reader per rank fetches ahead, builders turn bytes into batches, batches leave in order.

Threads and their hand-overs live here. What is fetched when comes from ``plan``, how a batch is built from
``batches``; the engine decides neither, and knows no epochs.
"""
