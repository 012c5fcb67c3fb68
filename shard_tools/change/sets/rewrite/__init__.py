"""Read chosen samples of a set in any order, change their fields, and write them anew.

Formats of others belong to ``convert`` and ``export``, not here.
"""
