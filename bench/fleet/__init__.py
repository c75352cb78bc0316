"""A simulation of many servers behind a balancer, from ten to ten thousand."""
