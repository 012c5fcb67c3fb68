"""Hold the options of a loader, as values that are checked where they are made.

The loops decide what becomes of them on a machine, in a mesh and with a dataset. Nothing here opens anything.
"""
