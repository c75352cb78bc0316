"""Long-running work: it reports progress, writes a log, and can be cancelled."""
