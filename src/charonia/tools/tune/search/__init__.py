"""Search modes as pure state machines that decide what is measured next. No clock, no network: ask, measure, tell."""
