"""Show the order as training sees it: a batch of a rank and why each sample is in it, when a sample comes, mixtures.

Everything is computed by the plan that training uses (``shard_tools.look.plan``). Nothing here computes an order, or
reads a sample. Modules return values; templates and JSON are made from them.
"""
