"""Access one kind of store per module: local disks, object stores, fsspec.

An adapter makes one request and translates its failure; it never retries. To add one, see CONTRIBUTING.md.
"""
