"""Model and server configuration: records, readers, writers, validation. Pure: nothing here opens a file."""
