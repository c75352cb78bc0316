"""The only reader of model folders: scanning, versions, watching."""
