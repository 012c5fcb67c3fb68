"""Run the engine's jobs on threads, stop them, and report what each is doing. Knows nothing of the jobs themselves."""
