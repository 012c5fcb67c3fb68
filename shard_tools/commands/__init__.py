"""Parse commands that are too long for ``cli``, and print what they did: one module for each.

The work itself is done by functions of the packages below, which know no command line.
"""
