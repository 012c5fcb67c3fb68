"""Cut recordings into rows of moments: what a row holds, which rows there are, and the bytes that they need.

Not here: sources that loops read (``sources``), what users name (``datasets``), and the index of a video
(``streaming/shards/video``).
"""
