"""Compare two sets by content: what is only in one of them, which fields and columns changed.

Every sample becomes a row: its key and, for each field, what the index knows of its bytes. Rows of both sets meet by
key; bytes are read only of those that the rows cannot tell apart. Writes nothing but temporary files.
"""
