"""Model and server configuration: records, readers, writers, validation. Pure: this package opens no files."""
