"""Servers on loopback, stores with faults, and what looks at pages; no set and no rank."""
