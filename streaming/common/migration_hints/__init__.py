"""Say what stands here for names of other libraries, where an attribute has failed.

This package holds a table, and what asks it. It knows nothing of ours but names; what a name means there and here is on
the pages of docs/coming-from.
"""
