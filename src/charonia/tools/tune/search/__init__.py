"""Which variant is measured next: search modes as pure state machines. No clock, no network: ask, measure, tell."""
