"""Parse streams of sound: find their links, pages and frames, and the context needed to decode from a moment on.

Of pictures, the first bits of packets. Nothing here decodes or calls a library that does: ``sound.py`` and ``groups/``
of ``streaming/build/decode/`` decode by these results.
"""
