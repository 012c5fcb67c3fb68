"""State the meaning of the numbers, ids and columns of a set, and compare it where sets meet. Pure.

Not here: reading ``schema.json`` (``catalog/build.py``), and decoding by it (``decode/``).
"""
