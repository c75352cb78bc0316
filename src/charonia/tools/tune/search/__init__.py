"""Search modes as pure state machines that decide the next measurement. No clock, no network: ask, measure, tell."""
