"""Read the formats of other programs, a module for each; nothing here writes shards or unpickles."""
