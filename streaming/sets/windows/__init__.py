"""Cut recordings into rows of moments: what a row holds, which rows there are, and the bytes that they need.

Here belong the arithmetic of windows and the reading of one unit. Sources that loops read stand in ``sources``, what
users name in ``datasets``, and the index of a video in ``streaming/shards/video``.
"""
