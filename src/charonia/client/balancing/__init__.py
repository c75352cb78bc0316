"""Several servers behind one client: load balancing, ejection and retries."""
