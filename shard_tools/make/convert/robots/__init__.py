"""Read recordings of robots: tables of steps, and videos of several cameras; no frame is encoded, none a sample."""
