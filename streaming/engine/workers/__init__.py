"""Run decode processes: start and end them, send them work, share memory with them."""
