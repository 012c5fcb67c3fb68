"""Change sets that live: leave out samples, name versions, and remove what no version holds any more.

Not here: what adds samples, which reads sources (``make/convert``), and how a version is published
(``streaming/shards/versions``).
"""
