"""Model repositories in object stores: S3, Google Cloud Storage, Azure Blob Storage."""
