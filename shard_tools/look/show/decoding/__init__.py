"""Decode values that nobody trusts, in processes that may be killed: pictures, arrays, sounds, videos, tokens.

Not here: what pages show of them (``data``). Nothing here knows sets or stores.
"""
