"""Sample map-style data sets under torch's own DataLoader."""
