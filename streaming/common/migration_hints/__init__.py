"""Suggest replacements for names of other libraries when an attribute is missing.

This package holds a table and its lookups. It depends on nothing else of ours; the pages of docs/coming-from explain
the names.
"""
