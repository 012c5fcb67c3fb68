"""Sample map-style datasets under torch's own DataLoader. Only indices are handled, no bytes of samples."""
