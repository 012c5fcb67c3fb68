"""Describe a set in the files of other programs, so that they read it: metadata beside the tars, or Parquet.

Where another program reads WebDataset tars, only what it wants beside them is written, from the index alone. A format
is a module with a function that yields files, and its row in ``run.FORMATS``.
"""
