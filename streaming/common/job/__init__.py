"""Let the processes of one job communicate: a store, work done once for all, an agreement check at the start.

Only small facts are exchanged, at the start or by polling; never batches.
"""
