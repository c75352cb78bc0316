"""Alerts of projects: conditions that are checked while the platform runs, and told to webhooks."""
