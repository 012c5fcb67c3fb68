"""Go from epoch to epoch: the place, the iterator that users get, the watch over it. Nothing reads here."""
