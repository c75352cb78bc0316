"""What people look at after a configuration search: one HTML file, pictures of its plots. Records in, bytes out."""
