"""Build batches from rows: decode, transform, collate, substitute what is unreadable, cut portions.

Knows samples and batches; knows no threads, no processes and no storage.
"""
