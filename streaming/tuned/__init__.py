"""Take options of a loader from a file that ``shard_tools bench --tune`` measured, and say where they may not hold.

``file`` has the format, for the command that writes it and the loader that reads it; it is pure but for reading.
``chosen`` puts its options beside those that a program gives. Only options about how batches are made ready belong in
such a file. What describes the data is in a ``mixture.json``, and what is trained on in the program.
"""
