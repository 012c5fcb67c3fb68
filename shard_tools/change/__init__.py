"""Work on finished sets: index, copy, reshard, repair, columns, functions, exports, checks.

Nothing here reads a source of another format.
"""
