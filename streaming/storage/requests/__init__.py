"""Send requests, with retries, stall detection, throttling, threads and a limit on bytes in flight.

All stores share one policy; no store's own error types are known here.
"""
