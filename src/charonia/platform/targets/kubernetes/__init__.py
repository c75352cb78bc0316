"""The target `kubernetes`: applies the objects of the Helm chart with server-side apply, and observes them."""
