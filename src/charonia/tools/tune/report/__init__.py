"""The reports of a configuration search: one HTML file, pictures of its plots. Records in, bytes out."""
