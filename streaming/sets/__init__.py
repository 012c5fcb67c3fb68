"""Describe what users name: data sets, mixtures, filters, and the sources that loops read.

Nothing here starts a thread or a process.
"""
