"""Define what stores, adapters and requests share: URLs, options, mirrors, the interface of an adapter.

Sends no request and knows no particular kind of store.
"""
