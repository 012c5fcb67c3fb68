"""Pack documents: which pieces stand together, from lengths alone. Pure; not here: tokens, files, data sets."""
