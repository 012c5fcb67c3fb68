"""Define the parts that stores, adapters and requests share: URLs, options, mirrors, the interface of an adapter.

Nothing here sends a request or depends on a particular kind of store.
"""
