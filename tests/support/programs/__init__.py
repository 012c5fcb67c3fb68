"""Programs and functions that tests start in other processes, by path or by name; none is a test itself."""
