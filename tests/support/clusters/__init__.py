"""Hosts, Ray clusters and executors, and what kills or counts their calls; nothing that runs on one host alone."""
