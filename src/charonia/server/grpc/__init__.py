"""The gRPC front end: HTTP/2 connections to engine calls and back."""
