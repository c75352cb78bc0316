"""The models for people and programs: a page to inspect and try them, and an OpenAPI document."""
