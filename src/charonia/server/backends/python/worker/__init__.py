"""What runs inside a worker process. Depends on the standard library and numpy, and runs on Python 3.8 and later."""
