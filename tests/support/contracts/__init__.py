"""Batteries that each source, order, row kind, loop, option and verb must pass, and all their kinds; no single case."""
