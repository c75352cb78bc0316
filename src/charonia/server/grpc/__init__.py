"""The gRPC front end: HTTP/2 connections, calls and methods."""
