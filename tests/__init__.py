"""Tests, in folders that mirror the packages; helpers are imported as ``tests.support.<room>.<module>``."""
