"""Hold where the packets of video streams lie in a shard, when their frames are shown, and their groups of pictures.

Not here: finding packets in a file, and decoding (``streaming/build/decode/groups``).
"""
