"""Compare two sets by content: samples that only one of them has, and changed fields and columns.

Every sample becomes a row: its key and, for each field, what the index knows of its bytes. Rows of both sets are
matched by key; only samples that the rows cannot tell apart are read. Writes nothing but temporary files.
"""
