"""Say what the numbers, ids and columns of a set mean, and compare it where sets meet. Pure.

Not here: reading ``schema.json`` (``catalog/build.py``), decoding by what it says (``decode/``).
"""
