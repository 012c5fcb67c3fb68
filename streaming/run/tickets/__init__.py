"""Account for samples that training consumes out of order: open, settled, and coming again after a restart.

Nothing here reads data: a loader does. ``records`` is pure, ``ledger`` is what many threads share.
"""
