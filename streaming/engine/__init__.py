"""The run layer: one reader per rank follows the plan, decoders turn bytes into batches, batches leave in order.

Modules, in the direction in which data flows:

- ``extents``, ``arena``: one fixed byte budget in which all fetched chunks lie;
- ``rows``: where each sample of each resident chunk lies in the arena;
- ``chunks``: fetching chunks into the arena, and giving their room back;
- ``build``: a batch from its rows: decode, transform, collate, substitute what is unreadable;
- ``pipeline``: which chunk is fetched when, which batch is built when; hands out batches in order.
"""
