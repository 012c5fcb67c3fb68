"""Pack documents: choose the pieces of each pack, from lengths alone. Pure: no tokens, files or datasets."""
