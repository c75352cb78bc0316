"""The load generator: sends requests to a server, measures, and says how far the numbers can be trusted."""
