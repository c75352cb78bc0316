"""The guard of a server of several processes, and its messages to and from the service manager."""
