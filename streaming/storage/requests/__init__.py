"""Send requests: retries, silences, throttling, threads and the bytes under way.

One policy for all stores; knows no store's own errors.
"""
