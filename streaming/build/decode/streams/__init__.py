"""What bytes say of a stream of sound: where its links, pages and frames lie, and what comes before a moment.

Nothing here decodes, or calls a library that does: ``streaming/build/decode/sound.py`` does, as told here.
"""
