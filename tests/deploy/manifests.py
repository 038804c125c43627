"""Manifests of `deploy/kubernetes` as a cluster would get them, and what their containers run."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("fleet", "tls", "autoscaling", "jobset", "kueue", "trainjob")
"""Folders that people apply."""
SCHEMAS = Path(__file__).parent / "schemas"
VERSION = "1.37.0"
"""Of Kubernetes."""

Resource = dict[str, Any]


def program(name: str) -> str:
    """A program of the environment that the tests run in, or of the machine."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed; scripts/setup installs it"
    return found


@cache
def rendered(overlay: str) -> tuple[Resource, ...]:
    """The resources of an overlay."""
    command = [program("kubectl"), "kustomize", str(KUBERNETES / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> list[Resource]:
    """The resources of one kind."""
    return [resource for resource in rendered(overlay) if resource["kind"] == kind]


def check(resource: Resource) -> None:
    """Raise a ValidationError where a resource is not as Kubernetes, or its custom resource definition, has it."""
    file = SCHEMAS / f"{resource['kind']}.json"
    if not file.exists():
        _check_core(json.dumps(resource))
        return
    Draft202012Validator(json.loads(file.read_text())).validate(resource)
    for replicated in replicated_jobs(resource):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
        _check_core(json.dumps({**job, "spec": replicated["template"]["spec"]}))


@cache
def _check_core(resource: str) -> None:
    """Check a resource of Kubernetes itself, which several overlays may have."""
    kubernetes_validate.validate(json.loads(resource), VERSION, strict=True)


def replicated_jobs(resource: Resource) -> list[Resource]:
    """The jobs of a JobSet or of a runtime; none of other kinds."""
    if resource["kind"] == "TrainingRuntime":
        return list(resource["spec"]["template"]["spec"]["replicatedJobs"])
    return list(resource["spec"]["replicatedJobs"]) if resource["kind"] == "JobSet" else []


@dataclass(frozen=True)
class Pod:
    """What pods are made from."""

    name: str
    labels: dict[str, str]
    spec: Resource

    @property
    def container(self) -> Resource:
        """Its only one."""
        (found,) = self.spec["containers"]
        return found

    @property
    def command(self) -> list[str]:
        """What it runs; the image of servers has an entry point."""
        return [*self.container.get("command", ["dataserver"]), *self.container["args"]]


def pods(overlay: str) -> Iterator[Pod]:
    """All of an overlay."""
    for resource in rendered(overlay):
        if resource["kind"] == "StatefulSet":
            template = resource["spec"]["template"]
            yield Pod(resource["metadata"]["name"], template["metadata"]["labels"], template["spec"])
        for job in replicated_jobs(resource):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": "train",
                "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
            }
            yield Pod(job["name"], labels, job["template"]["spec"]["template"]["spec"])
