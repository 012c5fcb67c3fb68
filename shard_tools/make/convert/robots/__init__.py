"""Read recordings of robots: tables of steps, and videos of several cameras that are cut by the same moments."""
