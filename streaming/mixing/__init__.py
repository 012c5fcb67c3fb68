"""Order several sources in given shares. Pure as ``plan``, which does not know them; not here: data sets."""
