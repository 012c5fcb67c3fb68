"""How tests start, fork, play, kill and wait for processes and threads; not what runs in them."""
