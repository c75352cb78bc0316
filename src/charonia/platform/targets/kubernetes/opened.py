"""Opens the target `kubernetes` with the platform's settings, and renders its Helm chart."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from charonia.core.errors import invalid, unavailable
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.data_folder import kept_text
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.objects import Plain, ServiceAddresses, object_name
from charonia.platform.targets.kubernetes.repositories import open_repositories
from charonia.platform.targets.kubernetes.target import KubernetesTarget
from charonia.platform.targets.kubernetes.values import chart_values, usual_values

OWNER_FILE = "kubernetes-owner"
"""File of the data folder with the name of this platform, if no setting has it."""


def open_kubernetes(settings: KubernetesSettings, store: ArtifactStore, data: Path) -> KubernetesTarget:
    """Return the target, without contacting the cluster."""
    cluster = Cluster(settings)
    chart = Chart(settings.chart, settings.helm, settings.values)

    def render(workload: Workload, repository: str) -> Sequence[Plain]:
        name = object_name(workload.deployment)
        values = chart_values(workload, repository, settings)
        return chart.render(name, cluster.namespace, usual_values(workload), values)

    return KubernetesTarget(
        cluster,
        owner_of(settings, data),
        render,
        open_repositories(store, settings.claim),
        ServiceAddresses(cluster.namespace, settings.proxy),
        lambda _: chart.problem(),
    )


def owner_of(settings: KubernetesSettings, data: Path) -> str:
    """Return the name of this platform among all that use the namespace: from the setting, or from its data folder."""
    return settings.owner or kept_text(data / OWNER_FILE, 8)


HELM_S_MAX = 30.0
"""Longest time of a run."""

_HERE = Path(__file__).parents
_PLACES = (_HERE[3] / "deploy" / "helm" / "charonia", _HERE[5] / "deploy" / "helm" / "charonia")
"""Of the wheel, and of a checkout."""

_INSTALL = "install Helm 3.14 or newer (https://helm.sh), or name the program with --helm"


class Chart:
    """The chart.

    Args:
        folder: Its path, "" for the chart that comes with Charonia.
        values: Path of an additional file of values, "" for none.
    """

    def __init__(self, folder: str, helm: str, values: str) -> None:
        self._folder = Path(folder).expanduser() if folder else next(filter(Path.is_dir, _PLACES), _PLACES[-1])
        self._helm = helm
        self._values = Path(values).expanduser() if values else None

    def problem(self) -> str:
        """Return why it cannot be rendered, "" if it can."""
        if not (self._folder / "Chart.yaml").is_file():
            return f"--kubernetes-chart: there is no chart in '{self._folder}'"
        if self._values is not None and not self._values.is_file():
            return f"--kubernetes-values: the file '{self._values}' does not exist"
        try:
            subprocess.run([self._helm, "version"], capture_output=True, timeout=HELM_S_MAX, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"--helm: '{self._helm}' cannot be run: {error} (hint: {_INSTALL})"
        return ""

    def render(self, name: str, namespace: str, usual: Mapping[str, Any], values: Mapping[str, Any]) -> Sequence[Plain]:
        """Return the objects of the chart.

        Args:
            usual: Values that the file of values may override.
        """
        with tempfile.TemporaryDirectory(prefix="charonia-chart-") as folder:
            files = [Path(folder) / "usual.json", *([self._values] if self._values else []), Path(folder) / "own.json"]
            files[0].write_text(json.dumps(usual), encoding="utf-8")
            files[-1].write_text(json.dumps(values), encoding="utf-8")
            command = [self._helm, "template", name, str(self._folder), f"--namespace={namespace}", "--skip-tests"]
            try:
                ended = subprocess.run(
                    [*command, *(f"--values={path}" for path in files)],
                    capture_output=True,
                    text=True,
                    timeout=HELM_S_MAX,
                    check=False,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise unavailable(f"'{self._helm}' cannot be run: {error}", hint=_INSTALL) from None
        if ended.returncode:
            raise invalid(f"the chart does not take these values: {' '.join(ended.stderr.split())}")
        return [each for each in yaml.load_all(ended.stdout, yaml.CSafeLoader) if each]
