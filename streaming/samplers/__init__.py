"""Sample map-style data sets under torch's own DataLoader: indices alone, no bytes of samples."""
