"""Run decode processes: start and end them, send them work, share memory with them.

Which batch is built when, the engine says; a worker knows cells of shared memory and no plan.
"""
