"""Draft strategies: one file each, over the base in ``base.py``."""
