"""Hold what all commands share: options and their sources, results and failures for people and programs.

Knows no command.
"""
