"""The files of models by the hash of their content, in a folder or an object store."""
