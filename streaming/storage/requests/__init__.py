"""Send requests, with retries, stall detection, throttling, threads and a bound on bytes in flight.

There is one policy for all stores; no store's own error types are known here.
"""
