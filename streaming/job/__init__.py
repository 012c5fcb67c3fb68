"""Let the processes of one job talk: a store, things done once, agreement at the start."""
