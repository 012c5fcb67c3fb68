"""Order several sources in given shares. Pure like ``plan``, which does not know this package. Not here: datasets."""
