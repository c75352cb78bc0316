"""Work that takes long: it has progress, a log, and can be cancelled."""
