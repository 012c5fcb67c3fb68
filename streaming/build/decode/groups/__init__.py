"""Find the packets of a video file, and decode groups of pictures from bytes of it: no file is opened to decode.

Not here: where groups are stored and found (``streaming/shards/video``), and clips of whole files
(``streaming/build/decode/video.py``).
"""
