"""Help for tests of models, of backends, and of programs that talk to a server.

- `plugin`: the pytest fixture `charonia_server`, available wherever this package is installed.
- `backend_suite`, `decoupled_suite`: conformance suites for backends, as test classes to derive from.
- `target_suite`: the one for targets of the platform.
- `clock`: a fake clock, which tests advance.
"""
