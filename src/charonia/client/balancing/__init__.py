"""Several servers behind one client: which of them gets a request, which get none for a while, what is tried again."""
