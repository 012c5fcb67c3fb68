"""Run long verbs: executors here or on a Ray cluster, progress, and findings, which several verbs report.

Knows no verb and no shard: what is done is a function that a verb brings along.
"""
