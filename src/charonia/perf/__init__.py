"""Load generation and measurement of any server of the KServe v2 protocol."""
