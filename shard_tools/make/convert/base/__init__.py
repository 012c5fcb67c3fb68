"""What every source needs: files in any store, records, and the mapping of rows to fields; it knows no format."""
