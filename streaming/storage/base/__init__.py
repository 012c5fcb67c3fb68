"""The words that a store, its adapters and its requests share: URLs, options, mirrors, what an adapter must do.

Sends no request and knows no kind of store.
"""
