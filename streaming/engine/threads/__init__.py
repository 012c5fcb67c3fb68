"""Run the engine's jobs on threads, end these, and say where each stands. Knows nothing of what they do."""
