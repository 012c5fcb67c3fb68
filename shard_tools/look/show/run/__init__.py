"""Look at a running job: ask its sockets or metrics addresses, which the command line names, and show what they say.

Nothing here makes a plan or reads a set; what numbers mean, and how time is divided, is known by ``streaming.metrics``.
"""
