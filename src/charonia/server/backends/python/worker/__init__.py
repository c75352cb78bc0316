"""What runs inside a worker process. Depends on the standard library and numpy, and runs on Python 3.8 and later.

There it is a package of another name (see `script`), since charonia may be missing: its modules import each other and
those of the channel relatively.
"""
