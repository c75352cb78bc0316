"""A load of a model under way: the versions that are ready, and whether they may answer yet."""

import asyncio
from dataclasses import dataclass, field

from charonia.core.metadata import ModelState
from charonia.server.lifecycle.configure import Configured
from charonia.server.lifecycle.entries import UNLOADED, ModelEntry, VersionContent, VersionEntry
from charonia.server.lifecycle.loader import LoadedVersion
from charonia.server.lifecycle.model_table import ModelTable
from charonia.server.lifecycle.provision import Provided


@dataclass(slots=True)
class PendingLoad:
    """A load of a model under way.

    Attributes:
        table: The models.
        model: The model.
        provided: Its files.
        configured: Its configuration.
        held: The versions that are ready and do not answer yet, with their entries and what they were loaded from.
    """

    table: ModelTable
    model: ModelEntry
    provided: Provided
    configured: Configured
    held: list[tuple[VersionEntry, LoadedVersion, VersionContent | None]] = field(default_factory=list)

    async def decide(self, *, is_complete: bool) -> None:
        """Let the versions that are held answer; where the load is not complete, close them all instead."""
        held, self.held = self.held, []
        if is_complete:
            for entry, loaded, content in held:
                before, entry.loaded = entry.loaded, loaded
                entry.state, entry.reason = ModelState.READY, ""
                entry.provided, entry.content = self.provided, content
                self.table.route(self.model)
                if before is not None:
                    self.table.retire(before)
            return
        for entry, _, _ in held:
            if entry.loaded is None:
                entry.state, entry.reason = ModelState.UNAVAILABLE, UNLOADED
        closing = [self.table.retire(loaded) for _, loaded, _ in held]
        if closing:  # they still use the files of the load
            await asyncio.wait(closing)
