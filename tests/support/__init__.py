"""What several test files need: one room per kind of helper, and the fixtures for all; no test lives here."""
