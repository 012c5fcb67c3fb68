"""Fetch byte ranges of chunks, check them, and read again what is damaged."""
