"""Sample map-style data sets under torch's own DataLoader. Only indices are handled, no bytes of samples."""
