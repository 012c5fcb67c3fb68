"""Account for samples that training consumes out of order: what is open, what is settled, and what comes after a restart.

Nothing here reads data: a loader does. ``records`` is pure, ``ledger`` is what many threads share.
"""
