"""Which process is which."""

from typing import Any

import pytest
from parallel.runtime_cases import Degrees, job_data

from dataserver.planning.identity import Job, parse_job
from trainclient.parallel.topology import Topology, TopologyError


def parsed(data: dict[str, Any]) -> Job:
    data["stream"]["datasets"][0]["fingerprint"] = "0" * 64
    ids = {name: 256 + i for i, name in enumerate(("bos", "eos", "boi", "eoi", "image", "query"))}
    data["stream"]["tokenizer"] = {"digest": "0" * 64, "vocab_size": 262, **ids}
    return parse_job(data)


def layout(degrees: Degrees) -> Topology:
    return Topology.of(parsed(job_data(degrees)).spec)


def test_ranks_are_dealt_module_by_module() -> None:
    found = layout(Degrees(2, 2, 2, 1))
    names = [(place.module.name, place.rank, place.stage) for place in found.places]
    assert names == [
        ("vit", 0, 0),
        ("vit", 1, 0),
        ("llm", 0, 0),
        ("llm", 0, 1),
        ("llm", 1, 0),
        ("llm", 1, 1),
        ("dit", 0, 0),
    ]
    assert [found.pipeline_stage(place) for place in found.places] == [0, 0, 1, 2, 1, 2, 3]
    assert found.world_size == 7


def test_neighbours() -> None:
    found = layout(Degrees(2, 2, 2, 1))
    sources = [found.sources(place) for place in found.places]
    targets = [found.targets(place) for place in found.places]
    assert sources == [(), (), (0, 1), (2,), (0, 1), (4,), (3, 5)]
    assert targets == [(2, 4), (2, 4), (3,), (6,), (5,), (6,), ()]


def test_every_way_has_two_ends() -> None:
    found = layout(Degrees(3, 4, 2, 2))
    for rank, place in enumerate(found.places):
        for peer in found.targets(place):
            assert rank in found.sources(found.places[peer])


def test_modules_may_be_missing() -> None:
    only = layout(Degrees(1, 1, 1, 1))
    assert len(only.pipeline) == 3
    data = job_data(Degrees(0, 2, 2, 0), generation={"ratio": "0"})
    found = Topology.of(parsed(data).spec)
    assert [found.pipeline_stage(place) for place in found.places] == [0, 1, 0, 1]
    assert found.sources(found.places[0]) == ()
    assert found.targets(found.places[3]) == ()


def test_wrong_number_of_processes_names_the_command() -> None:
    found = layout(Degrees(1, 2, 2, 1))
    found.require_world_size(6)
    with pytest.raises(TopologyError, match=r"WORLD_SIZE is 4 .* needs 6 .*torchrun --standalone --nproc-per-node 6"):
        found.require_world_size(4)


@pytest.mark.parametrize("degree", ["tp", "sp"])
def test_unsupported_degrees_are_refused(degree: str) -> None:
    data = job_data(Degrees())
    data["execution"]["modules"][1][degree] = 2
    with pytest.raises(TopologyError, match=f"module llm has {degree} 2"):
        Topology.of(parsed(data).spec)


def with_execution(**changes: Any) -> dict[str, Any]:
    data = job_data(Degrees(1, 1, 1, 1))
    data["execution"].update(changes)
    return data


def with_modules(*added: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    """A job with further modules, and changed fields of those that it has."""
    data = job_data(Degrees(1, 1, 1, 1))
    modules = [{**m, **changes.get(m["name"], {})} for m in data["execution"]["modules"]]
    data["execution"]["modules"] = [*modules, *added]
    return data


def contrastive() -> dict[str, Any]:
    towers = [{"name": m, "kind": "tower", "modality": m} for m in ("image", "text")]
    data = with_execution(modules=towers, layout={"kind": "contrastive"})
    data["stream"] |= {"contrastive_batch": 4, "packing": {"enabled": False}, "generation": {"ratio": "0"}}
    return data


def grouped() -> dict[str, Any]:
    data = with_modules(llm={"memory": {"room_bytes": 4096, "unit_bytes": 1}})
    data["execution"]["layout"] = {"kind": "grouped", "max_degree": 1}
    return data


INTERLEAVED = {"kind": "pipelined", "schedule": "interleaved", "chunks": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            with_execution(layout={"kind": "colocated"}),
            "the job's layout is colocated; .* layout.kind to pipelined",
        ),
        (
            with_execution(layout=INTERLEAVED),
            "the job's layout is pipelined with 2 chunks; .* schedule to 1f1b or gpipe",
        ),
        (contrastive(), "the job's layout is contrastive; this trainer runs pipelines"),
        (with_modules(vit={"padded": True}), "module vit is padded; this trainer does not pad items, leave padded out"),
        (grouped(), "the job's layout is grouped; this trainer runs pipelines"),
    ],
)
def test_what_servers_plan_and_this_trainer_does_not_run_is_refused(data: dict[str, Any], message: str) -> None:
    spec = parsed(data).spec
    with pytest.raises(TopologyError, match=message):
        Topology.of(spec)


@pytest.mark.parametrize(("kind", "name"), [("encoder", "vit"), ("generator", "dit")])
def test_several_modules_of_a_kind_are_refused(kind: str, name: str) -> None:
    data = with_modules({"name": "other", "kind": kind, "datasets": ["more"]})
    data["stream"]["datasets"].append({"name": "more", "fingerprint": "0" * 64})
    with pytest.raises(
        TopologyError, match=rf"the {kind} modules \['{name}', 'other'\]; this trainer runs one of a kind"
    ):
        Topology.of(parsed(data).spec)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_policies_that_change_only_the_plan_are_run(schedule: str) -> None:
    memory = {"memory": {"room_bytes": 4096, "unit_bytes": 1}}
    data = with_modules(
        vit={**memory, "balance": "karmarkar_karp_search"}, llm={**memory, "packing": "best_fit"}, dit=memory
    )
    data["execution"]["layout"] = {"kind": "pipelined", "schedule": schedule}
    assert Topology.of(parsed(data).spec).world_size == 3


def test_places_and_the_words_of_a_wrong_number_of_processes() -> None:
    found = layout(Degrees(2, 2, 3, 1))
    places = ["vit rank 0", "vit rank 1"]
    places += [f"llm rank {rank} stage {stage}" for rank in range(2) for stage in range(3)]
    assert [str(place) for place in found.places] == [*places, "dit rank 0"]
    assert [place.is_first_stage for place in found.places] == [True, True, *([True, False, False] * 2), True]
    vit, llm, dit = (place.module for place in (found.places[0], found.places[2], found.places[-1]))
    assert found.pipeline == ((vit, 0), (llm, 0), (llm, 1), (llm, 2), (dit, 0))
    assert [found.ranks(module, stage) for module, stage in found.pipeline] == [(0, 1), (2, 5), (3, 6), (4, 7), (8,)]
    assert [found.sources(place) for place in found.places] == [(), (), (0, 1), (2,), (3,), (0, 1), (5,), (6,), (4, 7)]
    assert [found.targets(place) for place in found.places] == [(2, 5), (2, 5), (3,), (4,), (8,), (6,), (7,), (8,), ()]
    with pytest.raises(TopologyError) as caught:
        found.require_world_size(10)
    assert str(caught.value) == (
        "WORLD_SIZE is 10 but the job needs 9 processes (vit dp 2, llm dp 2 x pp 3, dit dp 1); start it with `torchrun "
        "--nnodes NODES --nproc-per-node PROCESSES -m trainclient train ...` where NODES x PROCESSES = 9, on one "
        "machine: `torchrun --standalone --nproc-per-node 9 -m trainclient train ...`"
    )
    with pytest.raises(TopologyError, match=r"4 processes \(vit dp 1, llm dp 1 x pp 2, dit dp 1\)"):
        layout(Degrees(1, 1, 2, 1)).require_world_size(3)
    assert str(layout(Degrees(1, 1, 2, 1)).places[2]) == "llm rank 0 stage 1"
    for degree in ("tp", "sp"):
        data = job_data(Degrees())
        data["execution"]["modules"][1][degree] = 2
        with pytest.raises(TopologyError) as caught:
            Topology.of(parsed(data).spec)
        assert str(caught.value) == (
            f"module llm has {degree} 2; this trainer runs data and pipeline parallelism only, set {degree} to 1 and "
            "raise dp or pp instead"
        )
