"""The engine's threads: jobs on them, their end, and where each of them stands. Knows nothing of what they do."""
