"""Containers, monitoring, orchestration: the files themselves, and their commands run without a container engine."""
