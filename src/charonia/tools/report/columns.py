"""Columns of tables: each is declared one time, for the page, Markdown and the terminal."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Generic, TypeVar

from charonia.tools.report.quantities import in_columns

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a table of rows `R`.

    Attributes:
        text: The text of a row's cell.
        kind: Class of its cells in a page: "" for numbers, which are aligned to the right, else "text" and others.
        markup: Markup of its cells in a page, None for the escaped text.
    """

    title: str
    text: Callable[[R], str] = str
    kind: str = ""
    markup: Callable[[R], str] | None = None

    def cell(self, row: R) -> str:
        """Return the markup of a cell."""
        return escape(self.text(row)) if self.markup is None else self.markup(row)


def markup_table(columns: Sequence[Column[R]], rows: Iterable[R], kind: str = "", best: R | None = None) -> str:
    """Return a table for a page; the cells of the first column are heads of their rows."""
    first, *others = columns
    head = "".join(f"<th scope='col'{_class(column.kind)}>{escape(column.title)}</th>" for column in columns)
    lines = (
        f"<tr{_class('best' * (row is best))}><th scope='row'>{first.cell(row)}</th>"
        + "".join(f"<td{_class(column.kind)}>{column.cell(row)}</td>" for column in others)
        for row in rows
    )
    body = "".join(f"{line}</tr>" for line in lines)
    table = f"<table{_class(kind)}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    # It scrolls where it is wider than the page; with focus, the keyboard can scroll it.
    return f"<div class='wide' tabindex='0' role='group' aria-label='Table'>{table}</div>"


def text_table(columns: Sequence[Column[R]], rows: Iterable[R]) -> list[str]:
    """Return the lines of a table for a terminal."""
    numbers = [place for place, column in enumerate(columns) if not column.kind]
    cells = [[column.text(row) for column in columns] for row in rows]
    return in_columns([[column.title for column in columns], *cells], numbers)


def _class(name: str) -> str:
    return f" class='{name}'" if name else ""
