"""What a release is checked with, ``python -m tests.release``: its files, and programs of users."""
