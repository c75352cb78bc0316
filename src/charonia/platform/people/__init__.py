"""Access control: keys, roles, sessions, single sign-on, and the audit log."""
