"""Make sets: convert sources, tokenize text, write shards.

Nothing here changes a finished set.
"""
