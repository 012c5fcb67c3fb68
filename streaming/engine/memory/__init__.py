"""Hold fetched chunks: one byte budget, mapped files, and where each sample lies."""
