"""Hold what every wing may use: checks of arguments, arrays, counters, forks, threads, ranks of the job, platforms.

Nothing here knows shards, sets or batches.
"""
