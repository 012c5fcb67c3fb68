"""Observe a run: metrics, traces, and options tuned by measurement.

Nothing here is needed to make a batch.
"""
