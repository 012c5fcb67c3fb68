"""Show who reads what: the verb ``plan``, its loads, and its pictures."""
