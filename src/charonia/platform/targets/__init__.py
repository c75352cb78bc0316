"""Where deployments run, behind one protocol."""
