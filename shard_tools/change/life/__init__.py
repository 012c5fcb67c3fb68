"""Change a set by new versions: leave out samples, tag versions, and remove files that no version uses any more.

Adding samples reads sources and belongs to ``make/convert``; publishing a version belongs to
``streaming/shards/versions``.
"""
