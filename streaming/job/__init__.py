"""Let the processes of one job talk: a store, things done once, agreement at the start.

Small facts alone pass here, at the start or by polling; batches never do.
"""
