"""Account for samples that training consumes out of order: open, settled, and repeated after a restart.

Nothing here reads data: a loader does. ``records`` is pure; many threads share ``ledger``.
"""
