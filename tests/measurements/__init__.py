"""Measurements that stand in docs/measurements/: each is a script, `python -m tests.measurements.NAME`."""
