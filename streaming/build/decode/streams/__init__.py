"""Parse streams of sound: find their links, pages and frames, and the context needed to decode from a moment on.

Nothing here decodes or calls a library that does; ``streaming/build/decode/sound.py`` decodes by these results.
"""
