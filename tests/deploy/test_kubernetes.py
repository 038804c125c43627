"""Manifests are valid, and say what our commands take: rendered as a cluster would get them, since none is at hand."""

import copy
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deploy.manifests import KUBERNETES, OVERLAYS, ROOT, Pod, check, of_kind, pods, program, rendered
from jsonschema import Draft202012Validator, ValidationError

from dataserver.addresses import split_address
from dataserver.cli.config_flags import with_flags
from dataserver.cli.parsing import parse
from dataserver.planning.job.schema import job_schema
from dataserver.serving.config import ServerConfig, load_config
from trainclient.cli import _parse
from trainclient.training.config import TrainConfig

DOCKERFILES = sorted((ROOT / "deploy/images").glob("*.Dockerfile"))
FOREIGN = {"OMP_NUM_THREADS": "OpenMP", "PATH": "shells", "NUMBA_CPU_NAME": "numba", "NUMBA_CPU_FEATURES": "numba"}
"""Variables of other programs, and whose they are."""


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_resources_are_valid(overlay: str) -> None:
    for resource in rendered(overlay):
        check(resource)


def test_queues_are_valid() -> None:
    found = list(yaml.safe_load_all((KUBERNETES / "kueue/queues.yaml").read_text()))
    for resource in found:
        check(resource)
    names = {resource["kind"]: resource["metadata"]["name"] for resource in found}
    (jobset,) = of_kind("kueue", "JobSet")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == names["LocalQueue"]
    assert jobset["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("overlay", "kind", "path"),
    [
        ("fleet", "StatefulSet", ("spec", "template", "spec")),
        ("autoscaling", "HorizontalPodAutoscaler", ("spec",)),
        ("jobset", "JobSet", ("spec", "replicatedJobs", 0)),
        ("jobset", "JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0)),
        ("trainjob", "TrainJob", ("spec", "trainer")),
    ],
)
def test_a_misspelled_field_is_found(overlay: str, kind: str, path: tuple[str | int, ...]) -> None:
    (resource,) = of_kind(overlay, kind)
    wrong: Any = copy.deepcopy(resource)
    within = wrong
    for part in path:
        within = within[part]
    within["replica"] = 3
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError), match="replica"):
        check(wrong)


def arguments_of(pod: Pod) -> tuple[str, list[str]]:
    """The command of ours that a pod runs, and its arguments."""
    command = pod.command
    if command[0] == "torchrun":
        command = command[command.index("-m") + 1 :]
    return f"{command[0]} {command[1]}", command[2:]


def configured(overlay: str, pod: Pod, folder: Path) -> dict[str, Path]:
    """The files of the config maps that a pod mounts, written to a folder, by the paths that the pod sees."""
    maps = {resource["metadata"]["name"]: resource["data"] for resource in of_kind(overlay, "ConfigMap")}
    found = {}
    for mount in pod.container["volumeMounts"]:
        (volume,) = (volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"])
        if "configMap" in volume:
            for name, text in maps[volume["configMap"]["name"]].items():
                (folder / name).write_text(text)
                found[f"{mount['mountPath']}/{name}"] = folder / name
    return found


def all_pods() -> Iterator[tuple[str, Pod]]:
    for overlay in OVERLAYS:
        yield from ((overlay, pod) for pod in pods(overlay))


def server_config(overlay: str, pod: Pod, folder: Path) -> ServerConfig:
    """The configuration that a server of a pod has."""
    files = configured(overlay, pod, folder)
    found = []

    @with_flags(ServerConfig)
    def take(config: Path | None, flags: Mapping[str, Any]) -> None:
        """Take flags as `dataserver serve` does."""
        assert config is not None
        found.append(load_config(files[str(config)], flags))

    parse(take, "dataserver serve", arguments_of(pod)[1])()
    return found[0]


@pytest.mark.parametrize(("overlay", "pod"), [pytest.param(o, p, id=f"{o}-{p.name}") for o, p in all_pods()])
def test_commands_take_what_pods_give_them(overlay: str, pod: Pod, tmp_path: Path) -> None:
    name, arguments = arguments_of(pod)
    files = configured(overlay, pod, tmp_path)
    if name == "trainclient train":
        config = _parse(arguments, TrainConfig, TrainConfig, "train", "")
        assert str(config.job) in files
        servers = config.servers
    else:
        assert name == "dataserver serve"
        taken = server_config(overlay, pod, tmp_path)
        servers = ",".join(taken.peers)
        probed = taken.listen if overlay != "tls" else vars(taken)["health_listen"]
        probes = [
            pod.container[f"{kind}Probe"]
            for kind in ("startup", "readiness", "liveness")
            if f"{kind}Probe" in pod.container
        ]
        assert {probe["grpc"]["port"] for probe in probes} == {split_address(probed)[1]}
        (data,) = (port["containerPort"] for port in pod.container["ports"] if port["name"] == "data")
        assert data == split_address(taken.listen)[1] + 1000  # where servers put data connections by themselves
        assert {"cpu", "memory"} <= pod.container["resources"][
            "limits"
        ].keys()  # or it needs flags for threads and memory
        written = [m["mountPath"] for m in pod.container["volumeMounts"] if not m.get("readOnly")]
        assert taken.cache_dir is not None
        assert str(taken.cache_dir.parent) in written  # the server's own folder in a volume that others may write to
    services = {s["metadata"]["name"]: s for s in of_kind(overlay, "Service")}
    host, port = split_address(servers)
    assert port in [p["port"] for p in services[host]["spec"]["ports"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_find_the_servers_alone(overlay: str) -> None:
    for service in of_kind(overlay, "Service"):
        wanted = service["spec"]["selector"].items()
        found = [pod for pod in pods(overlay) if wanted <= pod.labels.items()]
        assert [arguments_of(pod)[0] for pod in found] == ["dataserver serve"]
        named = {port["name"]: port["containerPort"] for port in found[0].container["ports"]}
        assert {p["name"]: p["port"] for p in service["spec"]["ports"]}.items() <= named.items()


def test_what_belongs_to_the_fleet_selects_its_servers() -> None:
    (server,) = pods("fleet")
    (policy,) = of_kind("fleet", "NetworkPolicy")
    (budget,) = of_kind("fleet", "PodDisruptionBudget")
    for selector in (policy["spec"]["podSelector"], budget["spec"]["selector"]):
        assert selector["matchLabels"].items() <= server.labels.items()
    (peers, _) = policy["spec"]["ingress"]
    assert peers["from"][0]["podSelector"]["matchLabels"].items() <= server.labels.items()
    allowed = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(port["containerPort"] for port in server.container["ports"])


def test_the_autoscaler_owns_the_number_of_servers() -> None:
    (scaler,) = of_kind("autoscaling", "HorizontalPodAutoscaler")
    (servers,) = of_kind("autoscaling", "StatefulSet")
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (servers["kind"], servers["metadata"]["name"])
    assert "replicas" not in servers["spec"]
    (metric,) = scaler["spec"]["metrics"]
    (pod,) = pods("autoscaling")
    assert metric["pods"]["target"]["averageValue"] == pod.container["resources"]["limits"]["cpu"]
    rules = yaml.safe_load((KUBERNETES / "autoscaling/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rules[0]["seriesQuery"].startswith(metric["pods"]["metric"]["name"] + "{")
    assert rules[0]["metricsQuery"].startswith("max(")
    assert rules[0]["metricsQuery"].endswith(") by (<<.GroupBy>>)"), "one value for each pod, whatever scrapes it"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_rights_that_they_do_not_need(overlay: str) -> None:
    for pod in pods(overlay):
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        own = pod.container["securityContext"]
        assert (own["readOnlyRootFilesystem"], own["allowPrivilegeEscalation"]) == (True, False)
        assert own["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("overlay", ["jobset", "trainjob"])
def test_as_many_trainers_start_as_the_job_has_processes(overlay: str) -> None:
    (config,) = of_kind(overlay, "ConfigMap")
    job = yaml.safe_load(config["data"]["job.yaml"])
    Draft202012Validator(job_schema()).validate(job)
    processes = sum(m["dp"] * m.get("pp", 1) * m.get("tp", 1) for m in job["execution"]["modules"])
    if overlay == "trainjob":
        (train,) = of_kind(overlay, "TrainJob")
        nodes, each = train["spec"]["trainer"]["numNodes"], train["spec"]["trainer"]["numProcPerNode"]
        (runtime,) = of_kind(overlay, "TrainingRuntime")
        assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    else:
        (pod,) = (pod for pod in pods(overlay) if pod.name == "trainers")
        flags = dict(argument.removeprefix("--").split("=") for argument in pod.command if "=" in argument)
        nodes, each = int(flags["nnodes"]), int(flags["nproc-per-node"])
        (jobset,) = of_kind(overlay, "JobSet")
        (trainers,) = (r for r in jobset["spec"]["replicatedJobs"] if r["name"] == "trainers")
        assert trainers["template"]["spec"]["parallelism"] == nodes
        assert flags["rdzv-endpoint"].startswith(f"{jobset['metadata']['name']}-trainers-0-0.")
    assert processes == nodes * each


def test_variables_are_known() -> None:
    sources = "".join(path.read_text() for top in ("dataserver", "trainclient") for path in (ROOT / top).rglob("*.py"))
    given = {entry["name"] for _, pod in all_pods() for entry in pod.container.get("env", ())}
    for file in DOCKERFILES:
        for line in file.read_text().splitlines():
            if line.startswith("ENV "):
                given |= {part.partition("=")[0] for part in line.split()[1:]}
    assert "NUMBA_CACHE_DIR" in given
    assert {name for name in given if name not in FOREIGN and f'"{name}"' not in sources} == set()


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfiles_follow_the_rules_of_hadolint(file: Path) -> None:
    done = subprocess.run([program("hadolint"), str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    lines = file.read_text().splitlines()
    (pods_user,) = {pod.spec["securityContext"]["runAsUser"] for _, pod in all_pods()}
    assert f"USER {pods_user}:{pods_user}" in lines
    assert all((ROOT / name).exists() for name in ("LICENSE", "README.md", "pyproject.toml", "protos/disttrain"))
    for kept in (line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")):
        assert (ROOT / kept).exists()
