"""Run decode processes: start and stop them, send them work, share memory with them.

The engine decides when each batch is built. Workers know only ranges of shared memory, and no plan.
"""
