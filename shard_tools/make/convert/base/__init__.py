"""Code shared by all sources, not specific to a format: files in any store, records, and mapping rows to fields."""
