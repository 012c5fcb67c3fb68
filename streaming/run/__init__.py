"""Run epochs: loops, prefetching, worker processes, delivery, replicas, devices.

Nothing here names data: sets do, one wing below.
"""
