"""The configuration that a model completes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....channel.datatypes import TritonModelException

if TYPE_CHECKING:
    from typing import Any


class ModelConfig:
    """The configuration that `auto_complete_config` completes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary."""
        return self._config

    def set_max_batch_size(self, size: int) -> None:
        """Set the largest batch size, unless the configuration has a larger one."""
        value = self._config.get("max_batch_size", 0)
        if value > size:
            raise TritonModelException(
                "configuration specified max_batch_size {}, but in auto-complete-config function for model '{}' "
                "specified max_batch_size {}".format(value, self._config.get("name", ""), size)
            )
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        """Turn on dynamic batching, unless the configuration has another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other):
                raise TritonModelException(
                    "Configuration specified scheduling_choice as '{}', but auto-complete-config function for model "
                    "'{}' tries to set scheduling_choice as 'dynamic_batching'".format(
                        other, self._config.get("name", "")
                    )
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        """Set whether the model is decoupled."""
        if list(policy) != ["decoupled"] or not isinstance(policy["decoupled"], bool):
            raise TritonModelException(f"model transaction policy: expected {{'decoupled': bool}}, got {policy!r}")
        given = self._config.get("model_transaction_policy")
        if given and given.get("decoupled") != policy["decoupled"]:
            raise TritonModelException(
                "trying to change decoupled property in auto-complete-config for model '{}', which is already set to "
                "'{}'".format(self._config.get("name", ""), given.get("decoupled"))
            )
        self._config["model_transaction_policy"] = dict(policy)

    def add_input(self, properties: dict[str, Any]) -> None:
        """Add an input, or check that the configuration's agrees."""
        self._add("input", properties, ("name", "data_type", "dims", "optional"))

    def add_output(self, properties: dict[str, Any]) -> None:
        """Add an output, or check that the configuration's agrees."""
        self._add("output", properties, ("name", "data_type", "dims"))

    def _add(self, kind: str, properties: dict[str, Any], known: tuple[str, ...]) -> None:
        model = self._config.get("name", "")
        for key in properties:
            if key not in known:
                raise TritonModelException(
                    "{} '{}' in auto-complete-config function for model '{}' contains property other than {}.".format(
                        kind, properties.get("name", ""), model, ", ".join(f"'{k}'" for k in known)
                    )
                )
        for key in ("name", "data_type", "dims"):
            if key not in properties:
                raise TritonModelException(
                    "{} '{}' in auto-complete-config function for model '{}' is missing '{}' property.".format(
                        kind, properties.get("name", ""), model, key
                    )
                )
        for entry in self._config.setdefault(kind, []):
            if entry["name"] != properties["name"]:
                continue
            for key in [key for key in ("data_type", "dims", "optional") if key in properties]:
                if entry.get(key, "TYPE_INVALID") in ("TYPE_INVALID", []):
                    continue
                if list(np.atleast_1d(entry[key])) != list(np.atleast_1d(properties[key])):
                    raise TritonModelException(
                        "unable to load model '{}', configuration expects {} {} for {} '{}', model provides {}".format(
                            model, key, entry[key], kind, entry["name"], properties[key]
                        )
                    )
            entry.update(properties)
            return
        self._config[kind].append(dict(properties))
