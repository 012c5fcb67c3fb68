"""Read the formats of other programs, one module per format; no module writes shards or unpickles data."""
