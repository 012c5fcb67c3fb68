"""Small sets in our format, and loaders over them; what tools convert from is in ``sources``."""
