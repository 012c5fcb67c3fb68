"""Work on existing sets: open, list, select, copy, reshard, repair and reindex them.

Samples are written through ``convert.pack`` and the writer; no module here lays out a tar itself.
"""
