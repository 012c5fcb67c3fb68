"""Run decode processes: start and stop them, send them work, share memory with them.

The engine decides which batch is built when; a worker knows cells of shared memory, but no plan.
"""
