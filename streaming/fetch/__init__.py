"""Fetch byte ranges of chunks, check them, and read again what is damaged.

Which ranges a batch needs is worked out here, purely; when they are fetched, and where they lie, is not.
"""
