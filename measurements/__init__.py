"""Measurements whose figures stand in the docs; each is run by hand with ``python -m measurements.<name>``."""
