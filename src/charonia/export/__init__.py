"""Models as objects of systems that run servers: what `charonia export` writes."""
