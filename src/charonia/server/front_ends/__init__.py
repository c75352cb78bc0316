"""Front ends in processes of their own, over one engine."""
