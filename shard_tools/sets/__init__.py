"""Work on sets that exist: open, list, select, copy, reshard, repair and reindex them.

Samples that are written go through ``convert.pack`` and the writer; nothing here lays out a tar by itself.
"""
