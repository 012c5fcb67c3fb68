"""Work on sets that exist: open, list, copy, reshard and reindex them."""
