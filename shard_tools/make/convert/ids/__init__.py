"""Read token ids that other programs have written, in files without columns; no text is encoded, nothing unpickled."""
