"""Kinds of every contract, attacks, options and verbs as tables; the batteries themselves are ``streaming.testing``."""
