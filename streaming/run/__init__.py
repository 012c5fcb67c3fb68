"""Run epochs: loops, prefetching, worker processes, delivery, replicas, devices.

Nothing here names data: the sets do, one wing below.
"""
