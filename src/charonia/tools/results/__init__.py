"""Frozen, versioned records of measurements, and their JSON form."""
