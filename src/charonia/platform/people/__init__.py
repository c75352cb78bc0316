"""Who may do what: keys, roles, sessions, single sign-on, and the audit log."""
