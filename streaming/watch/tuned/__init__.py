"""Take options of a loader from a file of ``shard_tools bench --tune``, and warn if they may not fit.

``machinery`` lists the options that it may set. ``file`` defines the format, for the command that writes it and the
loader that reads it; apart from reading, it is pure. ``chosen`` merges the options with those that a program gives.
Only options about the preparation of batches belong in such a file. Options of data belong in a ``mixture.json``;
options that change the samples belong in the program.
"""
