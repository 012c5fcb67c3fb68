"""Run long commands: local executors or a Ray cluster, progress, and the findings that several commands report.

Knows no command and no shard: the work is a function that the command passes in.
"""
