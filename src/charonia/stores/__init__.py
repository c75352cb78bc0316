"""Object stores: their addresses, credentials, and how they are read."""
