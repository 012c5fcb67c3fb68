"""Run decode processes: start and stop them, send them work, share memory with them.

The engine decides when each batch is built; workers know cells of shared memory, but no plan.
"""
