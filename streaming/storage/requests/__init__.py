"""Send requests, with retries, stall detection, throttling, threads and a limit on bytes in flight.

All stores share one policy; nothing here depends on the error types of a store.
"""
