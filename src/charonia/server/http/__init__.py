"""HTTP/1.1: connections, routes and what they answer."""
