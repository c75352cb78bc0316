"""The objects of this platform in a cluster with KServe: InferenceServices, and what is noted about them."""

from collections.abc import Mapping
from typing import ClassVar

from charonia.platform.targets.kserve.view import NOTE, as_workload, note
from charonia.platform.targets.kubernetes.marks import INFERENCE_SERVICE, RECORD, SECRET, ObjectKind, reference
from charonia.platform.targets.kubernetes.own_objects import OwnObjects
from charonia.platform.targets.kubernetes.records import RevisionRecord
from charonia.platform.targets.kubernetes.rollout import Sight


class KserveObjects(OwnObjects):
    """Reads and writes the objects of deployments. See `OwnObjects`."""

    watched: ClassVar[Mapping[str, tuple[ObjectKind, str]]] = {
        **OwnObjects.watched,
        "services": (INFERENCE_SERVICE, ""),
        "notes": (SECRET, f",{RECORD}={NOTE}"),
    }

    def apply_objects(self, record: RevisionRecord, serving: int) -> None:
        """Apply the objects of a record, then note which revision they are of. See `OwnObjects`."""
        for each in record.objects:
            applied = self._cluster.apply(each)
            if reference(each).kind == INFERENCE_SERVICE:
                self._watched("services").put(applied)
                noted = note(applied, self.owner, record.deployment, record.revision, serving)
                self._watched("notes").put(self._cluster.apply(noted, force=True))

    def look(self, deployment: str, *, is_live: bool = False) -> Sight:
        """Return what there is of a deployment. See `OwnObjects`."""
        found = self._found(deployment, is_live=is_live)
        service, noted = (next(iter(found[what]), None) for what in ("services", "notes"))
        return self._sight(as_workload(service, noted, found["workloads"]), found)
