"""A chat for clients of OpenAI's API: LitServe's `OpenAISpec`. The names of input and output make it one."""

from typing import TypedDict

import charonia


class Answer(TypedDict):
    text_output: str


@charonia.model
def chat(text_input: str) -> Answer:
    return {"text_output": f"You said: {text_input.splitlines()[0]}"}
