"""Pack documents: choose the pieces of each pack, from lengths only. Pure. Not here: tokens, files, datasets."""
