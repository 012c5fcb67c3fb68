"""Run the engine's jobs on threads, stop them, and report what each does. Nothing here knows what the jobs are."""
