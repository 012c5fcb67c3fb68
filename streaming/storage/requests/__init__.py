"""Send requests: retries, silences, throttling, threads and the bytes under way."""
