"""Code shared by all sources, whatever the format: files in any store, records, and the mapping of rows to fields."""
