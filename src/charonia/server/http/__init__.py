"""The HTTP/1.1 front end: connections, routes and handlers."""
