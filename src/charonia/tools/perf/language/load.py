"""The requests of a language model's run, and the decoder of its responses, with tokenizers on this machine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from charonia.core.errors import invalid, unsupported
from charonia.core.metadata import ModelMetadata
from charonia.install_hint import extra_hint
from charonia.tools.perf.api import RunSettings, SequencePlan
from charonia.tools.perf.language.counts import ReplyReader
from charonia.tools.perf.language.plan import LanguageEndpoint, LanguagePlan, PromptPlan
from charonia.tools.perf.language.prompt_files import read_prompts
from charonia.tools.perf.language.prompts import Dialogue, TextGenerator, generated
from charonia.tools.perf.language.requests import LanguageSource, ModelInputs
from charonia.tools.perf.options import PerfOptions, WireProtocol
from charonia.tools.perf.run import Subject
from charonia.tools.results.records import LoadMode

TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"


class LanguageRun:
    """The requests, and the decoder of their responses.

    Args:
        model: Model name and version, "" for the server's choice.
        plan: The API and the tokenizer.
        seed: Seed of all random choices.
        inputs: The inputs of a model of the KServe protocol.
        is_grpc: Whether requests go over gRPC.

    Attributes:
        source: The requests.
        replies: Decodes the responses.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read, UNSUPPORTED if a package is missing.
    """

    def __init__(
        self,
        model: tuple[str, str],
        plan: LanguagePlan,
        prompts: PromptPlan,
        seed: int,
        inputs: ModelInputs,
        is_grpc: bool,
    ) -> None:
        tokenizer = FileTokenizer(plan.tokenizer) if plan.tokenizer else None

        def generator() -> TextGenerator:
            return TextGenerator(tokenizer, seed)

        if prompts.file:
            self._dialogues = read_prompts(prompts, generator, seed)
        else:
            self._dialogues = generated(prompts, generator(), seed)
        self._is_replay = prompts.is_replay
        self.source = LanguageSource(model, plan, prompts, self._dialogues, inputs)
        self.replies = ReplyReader(self.source, plan.endpoint, tokenizer, is_grpc)

    def settings(self, settings: RunSettings) -> RunSettings:
        """Return the settings of a run with what follows from the prompts: sessions, and the times of a replay."""
        if self.source.has_sessions:
            settings = replace(settings, sequences=SequencePlan(length_from_data=True))
        if not self._is_replay:
            return settings
        gaps_ns = replay_gaps(self._dialogues)
        # Each process sends at least one.
        processes = min(settings.load.process_count_max, len(gaps_ns))
        load = replace(settings.load, mode=LoadMode.INTERVALS, intervals_ns=gaps_ns, process_count_max=processes)
        measure = replace(settings.measure, request_count=len(gaps_ns))
        return replace(settings, load=load, measure=measure)


def language_run(options: PerfOptions, subject: Subject) -> LanguageRun:
    """Return the requests that the options describe.

    Raises:
        ServingError: As `LanguageRun`, and INVALID_ARG if the model is not a language model.
    """
    given, plan = options.target, options.language
    inputs = model_inputs(plan, subject.metadata, subject.config)
    prompts = replace(options.prompts, fields=given.parameters)
    is_grpc = given.protocol is WireProtocol.GRPC
    return LanguageRun((given.model, given.version), plan, prompts, options.load.seed, inputs, is_grpc)


def replay_gaps(dialogues: list[Dialogue]) -> tuple[int, ...]:
    """Return the time before each dialogue of a replay in nanoseconds; the first is sent immediately.

    Raises:
        ServingError: INVALID_ARG if all have the same time, which does not define a rate.
    """
    times = [dialogue.at_ms or 0.0 for dialogue in dialogues]
    before = [times[0], *times[:-1]]
    if times[-1] == times[0]:
        raise invalid(f"--fixed-schedule: expected different timestamps, got {times[0]:g} only")
    return tuple(round((time - last) * 1e6) for last, time in zip(before, times, strict=True))


def model_inputs(plan: LanguagePlan, metadata: ModelMetadata, config: Mapping[str, Any]) -> ModelInputs:
    """Return the inputs of a model.

    Raises:
        ServingError: INVALID_ARG if the KServe protocol is requested, and it is not a language model.
    """
    names = frozenset(tensor.name for tensor in metadata.inputs)
    outputs = {tensor.name for tensor in metadata.outputs}
    if not plan.endpoint.is_openai and (TEXT_INPUT not in names or TEXT_OUTPUT not in outputs):
        got = f"{', '.join(sorted(names)) or 'none'} and {', '.join(sorted(outputs)) or 'none'}"
        raise invalid(
            f"model '{metadata.name}': --endpoint {plan.endpoint.value}: expected an input '{TEXT_INPUT}' and an "
            f"output '{TEXT_OUTPUT}', got {got}",
        )
    batches = bool(config.get("max_batch_size", 0)) and plan.endpoint is LanguageEndpoint.INFER
    return ModelInputs(names, batches)


TOKENIZER_FILE = "tokenizer.json"


class FileTokenizer:
    """A tokenizer in the form of Hugging Face.

    Args:
        place: `tokenizer.json`, or a folder with one.

    Raises:
        ServingError: INVALID_ARG for another file, UNSUPPORTED without the package.
    """

    def __init__(self, place: str) -> None:
        path = Path(place)
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if path.suffix == ".gguf":
            raise invalid(
                f"tokenizer '{path}': expected {TOKENIZER_FILE}, got a GGUF file",
                hint="the folder of the original model has one; without a tokenizer, the server's counts are used",
            )
        if not path.is_file():
            raise invalid(f"tokenizer '{place}': expected {TOKENIZER_FILE} or a folder with one, got neither")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            library = import_module("tokenizers")
        except ImportError:
            raise unsupported("the package 'tokenizers' is not installed", hint=extra_hint("llm")) from None
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise invalid(f"tokenizer '{path}': cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [len(each.ids) for each in encoded]

    def words(self) -> list[str]:
        """Return the tokens that are words of plain letters."""
        found = (self._tokenizer.decode([number]).strip() for number in range(self._tokenizer.get_vocab_size()))
        return list(dict.fromkeys(word for word in found if word.isascii() and word.isalpha() and word.islower()))
