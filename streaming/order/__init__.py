"""Decide who gets which sample, when: plans, mixtures, packs.

Pure: no I/O, no clock, no torch.
"""
