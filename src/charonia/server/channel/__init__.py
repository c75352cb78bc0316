"""Messages and memory that processes of a server exchange: the format, the regions, handles of GPU memory, tables.

Worker processes use it without the package charonia, whichever Python they run: all modules but `end` and `tensors`
depend on the standard library and numpy only, run on Python 3.8 and later, and import each other relatively.
"""
