"""Measurements, run as ``python -m benchmarks NAME``; their results stand in ``results/``."""
