"""Write the files by which other programs read a set: metadata beside the tars, or Parquet.

For a program that reads WebDataset tars, only its metadata is written, from the index alone. A format is a module with
a function that yields files, and a row in ``run.FORMATS``.
"""
