"""What people and programs read about the models: a page to look at and try them, and an OpenAPI document."""
