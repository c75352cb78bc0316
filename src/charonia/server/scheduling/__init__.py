"""Schedulers as pure state machines: events and the time in, commands out. They know ids, never tensors or futures."""
