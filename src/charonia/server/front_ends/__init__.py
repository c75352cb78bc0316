"""Front ends in separate processes, over one engine."""
