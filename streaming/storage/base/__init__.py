"""Share the words of a store, its adapters and its requests: URLs, options, mirrors, what an adapter must do.

Sends no request and knows no kind of store.
"""
