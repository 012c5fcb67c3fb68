"""What all commands share: options and where they come from, results and failures for people and programs.

Knows no command.
"""
