"""Structured output and tools of models that do not have them: asked for in the prompt, and checked.

A schema comes from a client, and is checked against the output of a model: references are local and counted, and
patterns run in a library that needs linear time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.core.errors import invalid, unsupported
from charonia.install_hint import extra_hint
from charonia.wire.json_text import Object, kind_of

REPAIRS_MAX = 2
"""Most retries of an answer that does not fit."""

SCHEMA_CHARACTERS_MAX = 64 * 1024
"""Longest schema, and longest list of tools."""

REFERENCES_MAX = 10_000
"""Most references followed in the check of one answer."""

GUIDED = ("response_format", "tools", "tool_choice")
"""Members that this module meets."""

_REFUSED = frozenset({"patternProperties", "$dynamicRef", "$recursiveRef"})
_ONLY = "Answer only with {what}, without any other text."


@dataclass(frozen=True, slots=True)
class Guide:
    """What answers have to fit.

    Attributes:
        schema: Schema of the answer: {} for any object, None for text.
        tools: Schema of the arguments of each function that may be called, by name.
        must_call: Whether the answer has to be a call.
        prompt: Instructions for the model.
    """

    schema: Any
    tools: Mapping[str, Any]
    must_call: bool
    prompt: str

    def messages(self, messages: object) -> object:
        """Return the messages of a chat with the instructions, and with calls and their results as text."""
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            return messages  # is refused later
        told = [_as_text(message) for message in messages]
        if told and told[0].get("role") == "system" and isinstance(told[0].get("content"), str):
            return [{**told[0], "content": f"{told[0]['content']}\n\n{self.prompt}"}, *told[1:]]
        return [{"role": "system", "content": self.prompt}, *told]

    def check(self, text: str) -> tuple[str, list[Object]]:
        """Return the answer in a text: its content, and its calls.

        Raises:
            ValueError: It does not fit; says why.
        """
        found = _json_in(text)
        if self.tools:
            calls = found[0] if found is not None and isinstance(found[0], list) else [found[0]] if found else []
            if calls and all(isinstance(each, dict) and each.get("name") in self.tools for each in calls):
                return "", [self._call(each) for each in calls]
            if self.must_call:
                raise ValueError(f"expected a call of {' or '.join(self.tools)}")
        if self.schema is None:
            return text, []
        if found is None:
            raise ValueError("expected JSON")
        _check(self.schema, found[0])
        return found[1], []

    def _call(self, call: Any) -> Object:
        arguments = call.get("arguments", call.get("parameters", {}))
        _check({"type": "object", "allOf": [self.tools[call["name"]]]}, arguments)
        function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"type": "function", "function": function}

    def again(self, answer: str, problem: str) -> list[Object]:
        """Return the messages that follow an answer that does not fit."""
        ask = f"This answer is not valid: {problem[:500]}. {self.prompt}"
        return [{"role": "assistant", "content": answer}, {"role": "user", "content": ask}]


def read_guide(document: Mapping[str, Any]) -> Guide | None:
    """Return what the answers to a chat have to fit, None for nothing. Slow for a large schema.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED; the message begins with the member.
    """
    schema = _schema_of(document.get("response_format"))
    tools = _tools_of(document.get("tools"))
    choice = document.get("tool_choice")
    must_call = False
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if name not in tools:
            raise invalid(f"tool_choice: expected one of {', '.join(tools) or 'none'}, got {name!r:.100}")
        tools, must_call = {name: tools[name]}, True
    elif choice == "none":
        tools = {}
    elif choice == "required" and tools:
        must_call = True
    elif choice not in (None, "auto"):
        raise invalid(f"tool_choice: expected none, auto, or a function among tools, got {choice!r:.100}")
    if schema is None and not tools:
        return None
    given = document.get("tools") or []
    listed = [each["function"] for each in given if each["function"]["name"] in tools]
    return Guide(schema, tools, must_call, _prompt(schema, listed, must_call))


def _prompt(schema: Any, tools: Sequence[Any], must_call: bool) -> str:
    parts = []
    if tools:
        form = 'JSON of the form {"name": "FUNCTION", "arguments": {...}}'
        parts.append(f"Functions that can be called: {json.dumps(tools, ensure_ascii=False)}")
        parts.append(_ONLY.format(what=form) if must_call else f"To call one, answer only with {form}.")
    if schema is not None and not must_call:
        fitting = f"JSON that fits this JSON schema: {json.dumps(schema, ensure_ascii=False)}" if schema else "JSON"
        parts.append(f"Otherwise answer only with {fitting}." if tools else _ONLY.format(what=fitting))
    return "\n".join(parts)


def _as_text(message: Object) -> Object:
    if message.get("tool_calls") and isinstance(message["tool_calls"], list):
        calls = [call["function"] for call in message["tool_calls"] if isinstance(call, dict) and "function" in call]
        content = message.get("content")
        written = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
        return {
            "role": "assistant",
            "content": f"{content}\n{written}" if isinstance(content, str) and content else written,
        }
    if message.get("role") == "tool" and isinstance(message.get("content"), str):
        return {"role": "user", "content": f"Result of the call: {message['content']}"}
    return message


def _schema_of(form: object) -> Any:
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if isinstance(form, dict) and kind == "json_object":
        return {"type": "object"}
    schema = form.get("json_schema") if isinstance(form, dict) and kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise invalid("response_format: expected an object of type text, json_object, or json_schema with its schema")
    _check_schema("response_format", schema["schema"])
    return schema["schema"]


def _tools_of(tools: object) -> dict[str, Any]:
    """Return the schemas of the arguments of functions, by name."""
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise invalid(f"tools: expected an array of tools, got {kind_of(tools)}")
    found: dict[str, Any] = {}
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{number}]: expected a tool of type function, with the name of the function")
        schema = function.get("parameters") or {}
        _check_schema(f"tools[{number}]", schema)
        found[function["name"]] = schema
    return found


def _json_in(text: str) -> tuple[Any, str] | None:
    """Return the first JSON object or array of a text, and its text; None without one."""
    decoder = json.JSONDecoder()
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    if start < 0:
        return None
    try:
        value, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value, text[start:end]


def _check_schema(member: str, schema: Any) -> None:
    if len(json.dumps(schema)) > SCHEMA_CHARACTERS_MAX:
        raise invalid(f"{member}: expected a schema of at most {SCHEMA_CHARACTERS_MAX} characters")
    refused = next((key for key in _keys(schema) if key in _REFUSED), None)
    if refused is not None:
        raise unsupported(f"{member}: the server cannot check {refused}")
    jsonschema = _library(member)
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise invalid(f"{member}: not a JSON schema: {error.message[:200]}") from None


def _keys(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield from each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _library(member: str) -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise unsupported(
            f"{member}: a model without it needs a library that checks", hint=extra_hint("openai")
        ) from error
    return jsonschema


def _check(schema: Any, value: Any) -> None:
    """Check a value.

    Raises:
        ValueError: It does not fit; says why.
        ServingError: UNSUPPORTED: The schema cannot be followed.
    """
    jsonschema = _library("response_format")
    import referencing
    from pydantic_core import SchemaError, SchemaValidator, ValidationError

    base = jsonschema.Draft202012Validator
    followed = 0

    def follow(validator: Any, reference: Any, instance: Any, inside: Any) -> Any:
        nonlocal followed
        followed += 1
        if followed > REFERENCES_MAX:
            raise unsupported(f"the schema needs more than {REFERENCES_MAX} references")
        return base.VALIDATORS["$ref"](validator, reference, instance, inside)

    def match(validator: Any, pattern: Any, instance: Any, inside: Any) -> Iterator[Any]:
        if not isinstance(instance, str):
            return
        try:
            SchemaValidator({"type": "str", "pattern": pattern}).validate_python(instance)
        except SchemaError:
            raise unsupported(f"the server cannot check the pattern {pattern!r:.100}") from None
        except ValidationError:
            yield jsonschema.ValidationError(f"{instance!r:.100} does not match {pattern!r:.100}")

    kind = jsonschema.validators.extend(base, {"$ref": follow, "pattern": match})
    try:
        error = next(kind(schema, registry=referencing.Registry()).iter_errors(value), None)
    except (RecursionError, referencing.exceptions.Unresolvable) as fault:
        raise unsupported(f"the schema cannot be followed: {fault!s:.100}") from None
    if error is not None:
        where = "".join(f"[{each!r}]" for each in error.absolute_path)
        raise ValueError(f"{where + ': ' if where else ''}{error.message[:300]}")
