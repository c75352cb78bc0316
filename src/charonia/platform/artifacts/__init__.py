"""What models consist of: files, by the hash of their content, in a folder or an object store."""
