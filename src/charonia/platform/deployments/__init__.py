"""What is to run: specifications, revisions, and the reconciler that brings them about."""
