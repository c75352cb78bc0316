"""Help for tests of models, of backends, and of programs that talk to a server.

- `plugin`: the fixture `charonia_server` of pytest, there wherever this package is installed.
- `backend_suite`, `decoupled_suite`: what every backend has to do, as tests to derive from.
- `clock`: a clock that moves when it is told to.
"""
