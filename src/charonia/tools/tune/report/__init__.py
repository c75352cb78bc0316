"""The reports of a configuration search: one HTML file and tables. Records in, bytes out."""
