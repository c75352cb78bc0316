"""A client for servers of the KServe v2 protocol, over HTTP and gRPC."""
