"""Public test helpers: a fake clock, models to serve, conformance suites, a server fixture."""
