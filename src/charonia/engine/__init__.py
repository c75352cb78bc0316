"""The asyncio shell around the pure core: clock, runner of one model, life cycle, and the facade `api`."""
