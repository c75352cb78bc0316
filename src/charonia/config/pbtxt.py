"""Parsing and writing of config.pbtxt.

Protobuf's own parser reads the text, so its variants are accepted: commas or semicolons between fields, lists as `dims:
[1, 2]` or as repeated fields, `name { }` and `name: { }`, `#` comments, enumerations by name or number. Its errors
become one sentence with line, column and, for a misspelt name, the nearest known one.

Triton uses Protobuf's C++ parser. Python's parser unescapes strings by Python's rules, so escapes that mean something
else to one of the two are refused. Comments may contain any bytes; bytes outside UTF-8 are lone surrogates here.

Source: the grammar of protobuf's text format.
"""

import re

from google.protobuf import text_format

from charonia.config.convert import MESSAGE, from_message, to_message
from charonia.config.model import ModelConfig
from charonia.config.problems import field_hint, printable, short, value_hint
from charonia.core.errors import ServingError, invalid
from charonia.schema.pool import message_class, pool

_LITERAL = re.compile(
    r"""
    \#[^\n]*                                                            # a comment
    | (?P<quote>["'])(?P<inner>(?:(?!(?P=quote))[^\n\\]|\\.)*)(?P=quote)
    | ["'][^\n]*                                                        # a text without an end: the parser says so
    """,
    re.VERBOSE,
)
_BRACE = re.compile(r"""\#[^\n]*|(?P<quote>["'])(?:(?!(?P=quote))[^\n\\]|\\.)*(?P=quote)|[{}]""")
"""A brace, or a comment or text in which braces mean nothing."""

_ESCAPE = re.compile(
    r"""\\(?:
    [abfnrtv\\'"] | (?![4-7][0-7]{2})[0-7]{1,3} | x[0-9a-fA-F]{1,2}
    | u(?![dD][89a-fA-F])[0-9a-fA-F]{4} | U(?:0010|000(?!0[dD][89a-fA-F])[0-9a-fA-F])[0-9a-fA-F]{4}
    | (?P<wrong>[0-7]{3} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | .)
    )""",
    re.VERBOSE,
)
"""An escape; a wrong one is unknown, or means something else to Triton."""

_NO_CHARACTER = re.compile("[\ud800-\udfff]")


def _readable(text: str) -> str:
    """Return the text with "?" in comments for bytes that are not UTF-8. Raises ServingError for a wrong escape."""

    def checked(literal: re.Match[str]) -> str:
        if literal[0].startswith("#"):
            return _NO_CHARACTER.sub("?", literal[0])
        for escape in _ESCAPE.finditer(literal["inner"] or ""):
            if escape["wrong"]:
                offset = literal.start("inner") + escape.start()
                line, column = text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
                where = f"config.pbtxt line {line}, column {column}"
                sentence = printable(f"{where}: a text cannot have the escape {escape[0]}")
                raise invalid(sentence, hint="a backslash itself is written twice: \\\\")
        return literal[0]

    return _LITERAL.sub(checked, text)


MAX_TEXT_CHARS = 1024 * 1024
"""Longest accepted text. A configuration of ten thousand tensors fits."""

_NO_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)"')
_NO_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\S+?)\.?$')
_TWICE = re.compile(r'should not have multiple "(?P<name>\w+)" fields')
_ONE_OF = re.compile(r'Field "(?P<name>\w+)" is specified along with field "(?P<other>\w+)", another member of oneof')
_HINTS = (
    (re.compile(r"^expected string but found: '(\w+)'$"), 'texts stand in quotes: "\\1"'),
    (re.compile(r"^couldn't parse integer: [\"'](-?[0-9]+)[\"']"), "numbers stand without quotes: \\1"),
    (re.compile(r"^couldn't parse integer: (?:\?|None|null)"), "a dimension of any size is -1"),
    (re.compile(r'^expected "{"'), 'braces belong here, such as dynamic_batching { } or value { string_value: "8" }'),
    (re.compile(r'^expected ","'), 'a "[" has no "]", or there is no comma between two elements'),
)
"""Hints by the parser's message; a hint may repeat a part of it."""
_REWORDED = (
    (
        re.compile(r"codec can't decode byte 0x5c .*end of string$"),
        "a text has no quote at its end",
        '\\" is a quote within the text; a backslash itself is written twice: \\\\',
    ),
    (re.compile(r"'utf-8' codec can't decode byte "), "the bytes of a text are not UTF-8", ""),
    (re.compile(r"^Exceeds the limit \(\d+ digits\)"), "value out of range", ""),
)
"""Replacements of messages in which the parser only repeats a Python exception."""
_POSITION = re.compile(r"^\d+:\d+ : ")


def parse(text: str) -> ModelConfig:
    """Parse a config.pbtxt.

    Args:
        text: Its text. Bytes that are not UTF-8 are lone surrogates, as `errors="surrogateescape"` decodes them.

    Raises:
        ServingError: INVALID_ARG with line and column, or with the path of a field whose number its enumeration lacks.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise invalid(f"config.pbtxt has {len(text)} characters; at most {MAX_TEXT_CHARS} are read")
    message = message_class(MESSAGE)()
    # Some editors start a UTF-8 file with a byte order mark.
    text = text.removeprefix("\ufeff")
    try:
        readable = _readable(text)
        readable.encode()
        text_format.Parse(readable, message)
    except UnicodeEncodeError as error:
        line = readable.count("\n", 0, error.start) + 1
        raise invalid(f"config.pbtxt line {line}: {_no_character(readable[error.start])}") from None
    except text_format.ParseError as error:
        raise _explain(error, text) from None
    except ValueError as error:
        # Enumeration numbers beyond 32 bits reach the message unchecked, which knows no position.
        raise invalid(f"config.pbtxt: {printable(short(str(error)))}") from None
    return from_message(message)


def render(config: ModelConfig) -> str:
    """Return the text of a config.pbtxt that `parse` reads back as `config`, fields in the order of the schema.

    Raises:
        ServingError: INVALID_ARG for a value that the message cannot hold.
    """
    return text_format.MessageToString(
        to_message(config), as_utf8=True, use_short_repeated_primitives=True, use_index_order=True
    )


def _explain(error: text_format.ParseError, text: str) -> ServingError:
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    # The parser counts lines by "\n" only.
    lines = text.split("\n")
    source = lines[line - 1] if line <= len(lines) else ""
    problem = _POSITION.sub("", str(error), count=1).removeprefix(f"'{source}': ").removeprefix("'': ")
    sentence, hint = _reword(problem)
    if (problem.startswith('Expected "}"') or _NO_FIELD.search(problem)) and (brace := _unclosed(text)):
        hint = f"{brace}{f'; {hint}' if hint else ''}"
    if text.lstrip().startswith("{"):
        hint = "this is JSON; config.pbtxt holds fields without braces around them, such as max_batch_size: 8"
    return invalid(printable(f"config.pbtxt line {line}, column {column}: {sentence}"), hint=printable(hint))


def _unclosed(text: str) -> str:
    """Return which brace has no end, "" if each has one.

    A brace that ends in the column in which an outer one began its line shows that the inner one has no end.
    """
    lines = text.split("\n")
    open_lines: list[int] = []
    line = seen = suspect = 0
    for token in _BRACE.finditer(text):
        line += text.count("\n", seen, token.start())
        seen = token.start()
        if token[0] == "{":
            open_lines.append(line)
        elif token[0] == "}" and open_lines:
            column = _indent(lines[line])
            begins = lines[line].lstrip().startswith("}")
            inner, outer = open_lines.pop(), {_indent(lines[each]) for each in open_lines}
            if not suspect and begins and column < _indent(lines[inner]) and column in outer:
                suspect = inner
    if not open_lines:
        return ""
    line = suspect or open_lines[-1]
    return f"the brace in line {line + 1}, '{short(lines[line].strip())}', is not closed"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _no_character(surrogate: str) -> str:
    byte = ord(surrogate) - 0xDC00
    return f"byte 0x{byte:02x} is not UTF-8" if 0x80 <= byte <= 0xFF else f"{surrogate!a} is no character"


def _reword(problem: str) -> tuple[str, str]:
    """Return the parser's message reworded, and a hint."""
    if found := _NO_FIELD.search(problem):
        owner = pool().FindMessageTypeByName(found["type"])
        return f"{owner.name} has no field '{short(found['name'])}'", field_hint(found["name"], owner)
    if found := _NO_VALUE.search(problem):
        enum = pool().FindEnumTypeByName(found["type"])
        return f"{enum.name} has no value {short(found['name'])}", value_hint(found["name"], enum)
    if found := _TWICE.search(problem):
        return f"field '{found['name']}' is given twice", "only repeated fields may be given more than once"
    if found := _ONE_OF.search(problem):
        return f"'{found['name']}' and '{found['other']}' are both given", "at most one of them may be"
    for pattern, sentence, hint in _REWORDED:
        if pattern.search(problem):
            return sentence, hint
    sentence = problem[:1].lower() + problem[1:]
    hints = (found.expand(hint) for pattern, hint in _HINTS if (found := pattern.search(sentence)))
    return short(sentence), next(hints, "")
