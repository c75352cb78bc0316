"""The guard of a server of several processes, and what it and its service manager tell each other."""
