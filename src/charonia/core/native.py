"""A decorator for classes that are compiled and have subclasses that are not."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr  # the compiler knows it by this name
else:
    _Class = TypeVar("_Class", bound=type)

    def mypyc_attr(*, allow_interpreted_subclasses: bool) -> Callable[[_Class], _Class]:
        """Return the class unchanged: the source needs no permission."""
        return lambda cls: cls


__all__ = ["mypyc_attr"]
