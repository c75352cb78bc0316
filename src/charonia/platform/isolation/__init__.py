"""Isolates processes of projects: files, ports, other processes, variables."""
