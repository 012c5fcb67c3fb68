"""What must be delivered, computed without our code, and random cases to hold it against; no process."""
