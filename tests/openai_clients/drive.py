"""Drives clients of OpenAI's API, in the environment of the clients: `drive.py BASE_URL MODEL CLIENT...`.

Prints a JSON object for each client: under its name, for each feature "" where it works, else what went wrong. MODEL
has one slot and a template with tools. Not a test by itself, and not imported by any: the environment of the tests does
not have these packages.
"""

# mypy: ignore-errors
# These packages are not in the environment that is checked.
import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

BASE_URL, MODEL, *NAMES = sys.argv[1:]
KEY = "unused"
ASKED = "Name a moon of Jupiter."
LONG = "Count from one to twenty in words."
MESSAGES: list[Any] = [{"role": "user", "content": LONG}]
QUESTION: list[Any] = [{"role": "user", "content": ASKED}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}
FEW, ENOUGH, MANY = 8, 60, 3000
GREEDY: dict[str, Any] = {"temperature": 0}  # its answer to LONG always has more tokens than FEW
ENDLESS = "Write the numbers from 1 to 1000."  # its GREEDY answer goes on when a client leaves
ENDLESS_MESSAGES: list[Any] = [{"role": "user", "content": ENDLESS}]


def _called(city: str) -> list[Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": city, "type": "function", "function": function}]}
    return [{"role": "user", "content": f"Weather in {city}?"}, call]


CALLS: list[Any] = [*(each for city in ("Rome", "Oslo", "Bern") for each in _called(city)), _called("Paris")[0]]
"""A conversation after which a small model calls the function."""


class Moon(BaseModel):
    """A moon."""

    name: Literal["Io", "Europa"]


class weather(BaseModel):  # noqa: N801  # the name of the function
    """Weather"""

    city: Literal["Paris"]


def expect(fits: object, got: object) -> None:
    if not fits:
        raise ValueError(f"unexpected: {got!r:.300}")


def expect_refusal(ask: Callable[[], Any]) -> None:
    """Expect the server's message about an unknown model."""
    try:
        got = ask()
    except Exception as error:
        expect("does not exist" in str(error) + repr(error.__cause__), error)
    else:
        expect(False, got)


class OpenaiSdk:
    """The package openai, over /v1/chat/completions."""

    def __init__(self) -> None:
        import openai

        self.client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
        self.create = self.client.chat.completions.create

    def chat(self) -> None:
        answer = self.create(model=MODEL, messages=MESSAGES, max_tokens=FEW, **GREEDY)
        expect(answer.choices[0].message.content and answer.usage.completion_tokens == FEW, answer)

    def stream(self) -> None:
        asked: Any = {"max_tokens": FEW, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
        chunks = list(self.create(model=MODEL, messages=MESSAGES, **asked))
        expect("".join(each.choices[0].delta.content or "" for each in chunks if each.choices), chunks)
        expect(chunks[-1].usage.completion_tokens == FEW, chunks)

    def tools(self) -> None:
        answer = self.create(model=MODEL, messages=CALLS, tools=[TOOL], tool_choice="required", max_tokens=ENOUGH)
        call = answer.choices[0].message.tool_calls[0]
        expect((call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"}), call)
        called = [*CALLS, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        expect(self.create(model=MODEL, messages=called, tools=[TOOL], max_tokens=FEW).choices, called)

    def structured(self) -> None:
        answer = self.client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Moon, max_tokens=ENOUGH
        )
        expect(isinstance(answer.choices[0].message.parsed, Moon), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.create(model="none", messages=MESSAGES))

    def cancel(self) -> None:
        with self.create(model=MODEL, messages=ENDLESS_MESSAGES, max_tokens=MANY, stream=True, **GREEDY) as stream:
            expect(next(iter(stream)).id, stream)


class OpenaiResponses:
    """The package openai, over /v1/responses."""

    def __init__(self) -> None:
        import openai

        self.responses = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0).responses

    def chat(self) -> None:
        answer = self.responses.create(model=MODEL, input=LONG, max_output_tokens=FEW, **GREEDY)
        expect(answer.output_text and answer.status == "incomplete", answer)

    def stream(self) -> None:
        events = list(self.responses.create(model=MODEL, input=LONG, max_output_tokens=FEW, stream=True, **GREEDY))
        expect(events[-1].type == "response.incomplete" and events[-1].response.usage.output_tokens == FEW, events)

    def tools(self) -> None:
        tool = {"type": "function", **TOOL["function"]}
        past = []
        for message in CALLS:
            calls = [
                {"type": "function_call", "call_id": c["id"], **c["function"]} for c in message.get("tool_calls", ())
            ]
            past += calls or [message]
        answer = self.responses.create(
            model=MODEL, input=past, tools=[tool], tool_choice="required", max_output_tokens=ENOUGH
        )
        call = next(item for item in answer.output if item.type == "function_call")
        expect((call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"}), call)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        items = [*past, *answer.output, output]
        expect(self.responses.create(model=MODEL, input=items, tools=[tool], max_output_tokens=FEW).output, items)

    def structured(self) -> None:
        answer = self.responses.parse(model=MODEL, input=ASKED, text_format=Moon, max_output_tokens=ENOUGH)
        expect(isinstance(answer.output_parsed, Moon), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.responses.create(model="none", input=ASKED))

    def cancel(self) -> None:
        asked: Any = {"input": ENDLESS, "max_output_tokens": MANY, **GREEDY}
        with self.responses.create(model=MODEL, stream=True, **asked) as stream:
            expect(next(event for event in stream if event.type == "response.output_text.delta"), stream)


class Langchain:
    """The package langchain-openai."""

    def __init__(self) -> None:
        from langchain_openai import ChatOpenAI

        def model(name: str = MODEL, tokens: int = FEW, **members: Any) -> Any:
            return ChatOpenAI(model=name, base_url=BASE_URL, api_key=KEY, max_tokens=tokens, max_retries=0, **members)

        self.model = model

    def chat(self) -> None:
        answer = self.model(**GREEDY).invoke(LONG)
        expect(answer.content and answer.usage_metadata["output_tokens"] == FEW, answer)

    def stream(self) -> None:
        expect("".join(chunk.content for chunk in self.model().stream(ASKED)), "nothing")

    def tools(self) -> None:
        answer = self.model(tokens=ENOUGH).bind_tools([TOOL], tool_choice="weather").invoke(CALLS)
        expect(answer.tool_calls[0]["args"] == {"city": "Paris"}, answer)

    def structured(self) -> None:
        answer = self.model(tokens=ENOUGH).with_structured_output(Moon, method="json_schema").invoke(ASKED)
        expect(isinstance(answer, Moon), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.model("none").invoke(ASKED))

    def cancel(self) -> None:
        stream = self.model(tokens=MANY, **GREEDY).stream(ENDLESS)
        next(stream)
        stream.close()


class Litellm:
    """The package litellm."""

    def __init__(self) -> None:
        import litellm

        def ask(name: str = MODEL, **members: Any) -> Any:
            members = {"max_tokens": FEW, "messages": MESSAGES, **members}
            return litellm.completion(model=f"openai/{name}", api_base=BASE_URL, api_key=KEY, max_retries=0, **members)

        self.ask = ask

    def chat(self) -> None:
        answer = self.ask(**GREEDY)
        expect(answer.choices[0].message.content and answer.usage.completion_tokens == FEW, answer)

    def stream(self) -> None:
        expect("".join(chunk.choices[0].delta.content or "" for chunk in self.ask(stream=True)), "nothing")

    def tools(self) -> None:
        answer = self.ask(tools=[TOOL], tool_choice="required", max_tokens=ENOUGH, messages=CALLS)
        expect(json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}, answer)

    def structured(self) -> None:
        answer = self.ask(response_format=Moon, max_tokens=ENOUGH)
        expect(Moon.model_validate_json(answer.choices[0].message.content), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.ask("none"))

    def cancel(self) -> None:
        stream = self.ask(stream=True, max_tokens=MANY, messages=ENDLESS_MESSAGES, **GREEDY)
        next(stream)
        stream.completion_stream.close()


class PydanticAi:
    """The package pydantic-ai."""

    def __init__(self) -> None:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        def agent(name: str = MODEL, tokens: int = FEW, sampling: dict[str, Any] | None = None, **members: Any) -> Any:
            model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
            return Agent(model, model_settings={"max_tokens": tokens, **(sampling or {})}, retries=0, **members)

        self.agent = agent

    def chat(self) -> None:
        answer = self.agent(sampling=GREEDY).run_sync(LONG)
        expect(answer.output and answer.usage.output_tokens == FEW, answer)

    async def stream(self) -> None:
        async with self.agent().run_stream(ASKED) as answer:
            expect([text async for text in answer.stream_text(delta=True)], answer)

    def structured(self) -> None:
        from pydantic_ai import NativeOutput

        answer = self.agent(tokens=ENOUGH, output_type=NativeOutput(Moon)).run_sync(ASKED)
        expect(isinstance(answer.output, Moon), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.agent("none").run_sync(ASKED))

    async def cancel(self) -> None:
        async with self.agent(tokens=MANY, sampling=GREEDY).run_stream(ENDLESS) as answer:
            async for _ in answer.stream_text(delta=True, debounce_by=None):
                return


class Instructor:
    """The package instructor."""

    def __init__(self) -> None:
        import instructor
        import openai

        raw = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
        self.by_tools = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
        self.by_schema = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)

    def ask(self, client: Any, kind: Any, name: str = MODEL, **members: Any) -> Any:
        members = {"max_tokens": ENOUGH, "messages": QUESTION, **members}
        return client.chat.completions.create(model=name, response_model=kind, max_retries=0, **members)

    def chat(self) -> None:
        answer = self.ask(self.by_schema, None)
        expect(answer.choices[0].message.content, answer)

    def stream(self) -> None:
        import instructor

        found = list(self.ask(self.by_schema, instructor.Partial[Moon], stream=True))
        expect(found[-1].name in ("Io", "Europa"), found)

    def tools(self) -> None:
        expect(self.ask(self.by_tools, weather, messages=CALLS).city == "Paris", "another city")

    def structured(self) -> None:
        expect(self.ask(self.by_schema, Moon).name in ("Io", "Europa"), "another moon")

    def error(self) -> None:
        expect_refusal(lambda: self.ask(self.by_schema, Moon, "none"))

    def cancel(self) -> None:
        stream = self.ask(self.by_schema, None, stream=True, max_tokens=MANY, messages=ENDLESS_MESSAGES, **GREEDY)
        next(iter(stream))
        stream.close()


class OpenaiAgents:
    """The package openai-agents."""

    def __init__(self) -> None:
        import agents
        import openai

        self.agents = agents
        agents.set_tracing_disabled(True)
        self.client = lambda: openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)

    def agent(
        self, name: str = MODEL, tokens: int = FEW, sampling: dict[str, Any] | None = None, **members: Any
    ) -> Any:
        settings = self.agents.ModelSettings(max_tokens=tokens, **(sampling or {}))
        model = self.agents.OpenAIChatCompletionsModel(name, self.client())
        return self.agents.Agent("a", instructions="Be brief.", model=model, model_settings=settings, **members)

    async def chat(self) -> None:
        answer = await self.agents.Runner.run(self.agent(), ASKED)
        expect(answer.final_output, answer)

    async def stream(self) -> None:
        answer = self.agents.Runner.run_streamed(self.agent(), ASKED)
        expect([event async for event in answer.stream_events()] and answer.final_output, answer)

    async def structured(self) -> None:
        answer = await self.agents.Runner.run(self.agent(tokens=ENOUGH, output_type=Moon), ASKED)
        expect(isinstance(answer.final_output, Moon), answer)

    async def error(self) -> None:
        try:
            await self.agents.Runner.run(self.agent("none"), ASKED)
        except Exception as error:
            expect("does not exist" in str(error), error)
        else:
            expect(False, "an answer")

    async def cancel(self) -> None:
        answer = self.agents.Runner.run_streamed(self.agent(tokens=MANY, sampling=GREEDY), ENDLESS)
        async for event in answer.stream_events():
            if event.type == "raw_response_event":
                break
        answer.cancel()


class Dspy:
    """The package dspy."""

    def __init__(self) -> None:
        import dspy

        self.dspy = dspy

    def lm(self, name: str = MODEL, tokens: int = FEW) -> Any:
        return self.dspy.LM(
            f"openai/{name}", api_base=BASE_URL, api_key=KEY, max_tokens=tokens, cache=False, num_retries=0
        )

    def chat(self) -> None:
        expect(self.lm()(ASKED)[0], "nothing")

    def error(self) -> None:
        expect_refusal(lambda: self.lm("none")(ASKED))


class Haystack:
    """The package haystack-ai."""

    def __init__(self) -> None:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.utils import Secret

        self.message = ChatMessage
        self.messages = [ChatMessage.from_user(ASKED)]

        def generator(name: str = MODEL, tokens: int = FEW, callback: Any = None, **members: Any) -> Any:
            return OpenAIChatGenerator(
                Secret.from_token(KEY), name, callback, BASE_URL, max_retries=0,
                generation_kwargs={"max_tokens": tokens, **members},
            )  # fmt: skip

        self.generator = generator

    def chat(self) -> None:
        expect(self.generator().run(self.messages)["replies"][0].text, "nothing")

    def stream(self) -> None:
        pieces: list[Any] = []
        self.generator(callback=pieces.append).run(self.messages)
        expect("".join(piece.content for piece in pieces), pieces)

    def tools(self) -> None:
        from haystack.tools import Tool

        tool = Tool("weather", "Weather", PARAMETERS, str)
        messages = [self.message.from_openai_dict_format(each) for each in CALLS]
        answer = self.generator(tokens=ENOUGH, tool_choice="required").run(messages, tools=[tool])["replies"][0]
        expect(answer.tool_calls[0].arguments == {"city": "Paris"}, answer)

    def structured(self) -> None:
        answer = self.generator(tokens=ENOUGH, response_format=Moon).run(self.messages)["replies"][0]
        expect(Moon.model_validate_json(answer.text), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.generator("none").run(self.messages))


class Smolagents:
    """The package smolagents."""

    def __init__(self) -> None:
        from smolagents import OpenAIServerModel

        def model(name: str = MODEL, tokens: int = FEW) -> Any:
            return OpenAIServerModel(name, BASE_URL, api_key=KEY, max_tokens=tokens, client_kwargs={"max_retries": 0})

        self.model = model

    def chat(self) -> None:
        expect(self.model().generate(MESSAGES).content, "nothing")

    def stream(self) -> None:
        expect("".join(delta.content or "" for delta in self.model().generate_stream(MESSAGES)), "nothing")

    def structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "moon", "schema": Moon.model_json_schema()}}
        answer = self.model(tokens=ENOUGH).generate(QUESTION, response_format=form)
        expect(Moon.model_validate_json(answer.content), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.model("none").generate(MESSAGES))

    def cancel(self) -> None:
        stream = self.model(tokens=MANY).generate_stream(ENDLESS_MESSAGES, **GREEDY)
        next(stream)
        stream.close()


class LlamaIndex:
    """The package llama-index-llms-openai-like."""

    def __init__(self) -> None:
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        self.messages = [ChatMessage(role="user", content=ASKED)]
        self.long = [ChatMessage(role="user", content=LONG)]

        def llm(name: str = MODEL, tokens: int = FEW, **members: Any) -> Any:
            return OpenAILike(
                model=name, api_base=BASE_URL, api_key=KEY, is_chat_model=True, max_tokens=tokens, max_retries=0,
                additional_kwargs=members,
            )  # fmt: skip

        self.llm = llm

    def chat(self) -> None:
        answer = self.llm(**GREEDY).chat(self.long)
        expect(answer.message.content and answer.raw.usage.completion_tokens == FEW, answer)

    def stream(self) -> None:
        expect("".join(piece.delta or "" for piece in self.llm().stream_chat(self.messages)), "nothing")

    def structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "moon", "schema": Moon.model_json_schema()}}
        answer = self.llm(tokens=ENOUGH, response_format=form).chat(self.messages)
        expect(Moon.model_validate_json(answer.message.content), answer)

    def error(self) -> None:
        expect_refusal(lambda: self.llm("none").chat(self.messages))


CLIENTS = {
    "openai": OpenaiSdk,
    "openai-responses": OpenaiResponses,
    "langchain-openai": Langchain,
    "litellm": Litellm,
    "pydantic-ai": PydanticAi,
    "instructor": Instructor,
    "openai-agents": OpenaiAgents,
    "dspy": Dspy,
    "haystack": Haystack,
    "smolagents": Smolagents,
    "llama-index": LlamaIndex,
}
FEATURES = ("chat", "stream", "tools", "structured", "error", "cancel")


def outcomes(client: Any) -> dict[str, str]:
    found = {}
    for feature in FEATURES:
        act = getattr(client, feature, None)
        if act is None:  # the client does not offer it
            continue
        print(feature, file=sys.stderr, flush=True)
        try:
            done = act()
            if inspect.iscoroutine(done):
                asyncio.run(done)
            found[feature] = ""
        except Exception as error:
            traceback.print_exc()
            found[feature] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    for name in NAMES:
        print(f"== {name}", file=sys.stderr, flush=True)
        print(json.dumps({name: outcomes(CLIENTS[name]())}), flush=True)
