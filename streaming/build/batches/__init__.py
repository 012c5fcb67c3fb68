"""Build batches from rows: decode, transform, collate, replace unreadable samples, take portions.

Handles samples and batches; knows no threads, no processes and no storage.
"""
