"""Parse the commands that are too long for ``cli``, and print their reports: one module per command or group.

The work itself is done by functions of other packages, which do not depend on the command line.
"""
