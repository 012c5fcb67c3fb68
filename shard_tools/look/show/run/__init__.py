"""Look at a running job: query its sockets or metrics addresses, given on the command line, and show the answers.

Nothing here makes a plan or reads a set; ``streaming.metrics`` knows the meaning of numbers and the division of time.
"""
