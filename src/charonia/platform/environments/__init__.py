"""Python versions with packages, built once."""
