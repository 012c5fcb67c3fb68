"""Epochs one after the other: the place in them, the iterator that users get, the watch over it. Nothing reads here."""
