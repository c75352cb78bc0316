"""The version of the installed package, in a module that imports nothing else of it."""

from importlib.metadata import version

__version__ = version("charonia")
