"""Build batches from rows: decode, transform, collate, replace unreadable samples, take portions.

Handles samples and batches only; threads, processes and storage are elsewhere.
"""
