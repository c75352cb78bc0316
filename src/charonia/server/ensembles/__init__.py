"""Ensembles: models whose requests flow through the steps of a graph."""
