"""Talk to one kind of store each: local disks, object stores, fsspec.

An adapter makes one request and names its failure; it never tries again. How to add one: CONTRIBUTING.md.
"""
