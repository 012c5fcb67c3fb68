"""Hold fetched chunks: one byte budget, mapped files, and where each sample lies.

Nothing here decides what is fetched or dropped; it keeps the room that the engine gives and takes.
"""
