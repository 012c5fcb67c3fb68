"""Read selected samples of a set in any order, change their fields, and write them as a new set.

Other formats belong to ``convert`` and ``export``, not here.
"""
