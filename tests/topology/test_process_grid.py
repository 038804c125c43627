"""The grid of processes."""

from typing import Any

import pytest
from program.runtime_cases import Degrees, job_data

from dataserver.planning.job.identity import Job, parse_job
from trainclient.topology.process_grid import GridProcess, Topology, TopologyError


def parsed(data: dict[str, Any]) -> Job:
    for dataset in data["stream"]["datasets"]:
        dataset["fingerprint"] = "0" * 64
    ids = {name: 256 + i for i, name in enumerate(("bos", "eos", "boi", "eoi", "image", "query"))}
    data["stream"]["tokenizer"] = {"digest": "0" * 64, "vocab_size": 262, **ids}
    return parse_job(data)


def layout(degrees: Degrees) -> Topology:
    return Topology.of(parsed(job_data(degrees)).spec)


def chunk_names(process: GridProcess) -> list[str]:
    return [f"{c.module.name} {c.number}/{c.count}" for c in process.chunks]


def edges(found: Topology) -> dict[str, tuple[tuple[int, int], ...]]:
    """Pairs of global ranks by the chunks at both ends."""
    ends = [(edge, *(f"{c.module.name}{c.number}" for c in (edge.source, edge.target))) for edge in found.edges]
    return {f"{source} {target}": found.pairs(edge) for edge, source, target in ends}


def test_ranks_are_dealt_module_by_module() -> None:
    found = layout(Degrees(2, 2, 2, 1))
    names = [(process.modules[0].name, process.rank, process.stage) for process in found.processes]
    assert names == [
        ("vit", 0, 0),
        ("vit", 1, 0),
        ("llm", 0, 0),
        ("llm", 0, 1),
        ("llm", 1, 0),
        ("llm", 1, 1),
        ("dit", 0, 0),
    ]
    assert found.world_size == 7
    assert found.stages == (((0,), (1,)), ((2,), (4,)), ((3,), (5,)), ((6,),))


def test_tensor_parallel_ranks_are_neighbours_and_their_leader_exchanges_rows() -> None:
    found = layout(Degrees(1, 2, 2, 1, tp=(2, 2, 1)))
    assert [str(process) for process in found.processes] == [
        *("vit rank 0 tp rank 0", "vit rank 0 tp rank 1"),
        *(f"llm rank {rank} stage {stage} tp rank {tp}" for rank in (0, 1) for stage in (0, 1) for tp in (0, 1)),
        "dit rank 0",
    ]
    assert found.stages == (((0, 1),), ((2, 3), (6, 7)), ((4, 5), (8, 9)), ((10,),))
    assert edges(found) == {
        "vit0 llm0": ((0, 2), (0, 6)),
        "llm1 dit0": ((4, 10), (8, 10)),
        "llm0 llm1": ((2, 4), (6, 8)),
    }
    with pytest.raises(TopologyError, match=r"vit dp 1 x tp 2, llm dp 2 x pp 2 x tp 2, dit dp 1"):
        found.require_world_size(4)


def test_shares_of_sequences_go_straight_on_and_other_modules_meet_the_first_one() -> None:
    found = layout(Degrees(1, 2, 2, 1, sp=2))
    shares = [(rank, stage, share) for rank in (0, 1) for stage in (0, 1) for share in (0, 1)]
    assert [str(process) for process in found.processes] == [
        "vit rank 0",
        *(f"llm rank {rank} stage {stage} share {share}" for rank, stage, share in shares),
        "dit rank 0",
    ]
    assert found.stages == (((0,),), ((1,), (2,), (5,), (6,)), ((3,), (4,), (7,), (8,)), ((9,),))
    assert edges(found) == {
        "vit0 llm0": ((0, 1), (0, 5)),
        "llm1 dit0": ((3, 9), (7, 9)),
        "llm0 llm1": ((1, 3), (5, 7), (2, 4), (6, 8)),
    }
    assert [g.ranks for g in found.sequence_groups] == [(0,), (0,), (1,), (1,)]
    assert tuple(g.members for g in found.sequence_groups) == found.readers
    assert found.readers == ((1, 2), (3, 4), (5, 6), (7, 8))
    with pytest.raises(TopologyError, match=r"vit dp 1, llm dp 2 x pp 2 x sp 2, dit dp 1"):
        found.require_world_size(4)
    alone = job_data(Degrees(0, 1, 1, 0, tp=(1, 2, 1), sp=2), generation={"ratio": "0"})
    split = Topology.of(parsed(alone).spec)
    assert str(split.processes[1]) == "llm rank 0 share 0 tp rank 1"
    assert split.stages == (((0, 1), (2, 3)),)
    assert ([g.members for g in split.sequence_groups], split.readers) == ([(0, 2), (1, 3)], ((0, 1, 2, 3),))


def test_rows_go_from_every_rank_to_every_rank_between_modules_and_straight_on_within_one() -> None:
    assert edges(layout(Degrees(2, 2, 2, 1))) == {
        "vit0 llm0": ((0, 2), (0, 4), (1, 2), (1, 4)),
        "llm1 dit0": ((3, 6), (5, 6)),
        "llm0 llm1": ((2, 3), (4, 5)),
    }
    found = layout(Degrees(1, 1, 1, 1))
    assert [edge.is_straight for edge in found.edges] == [False, False]
    assert edges(found) == {"vit0 llm0": ((0, 1),), "llm0 dit0": ((1, 2),)}


def test_a_graph_of_several_modules_of_a_kind() -> None:
    found = layout(Degrees(1, 2, 1, 1, second_encoder=2, second_generator=1))
    assert [str(process) for process in found.processes] == [
        *("vit rank 0", "vit_more rank 0", "vit_more rank 1", "llm rank 0", "llm rank 1", "dit rank 0"),
        "dit_more rank 0",
    ]
    llm = found.processes[3].chunks[0]
    assert [edge.source.module.name for edge in found.into(llm)] == ["vit", "vit_more"]
    assert [edge.target.module.name for edge in found.out_of(llm)] == ["dit", "dit_more"]
    assert edges(found)["vit_more0 llm0"] == ((1, 3), (1, 4), (2, 3), (2, 4))
    assert edges(found)["llm0 dit_more0"] == ((3, 6), (4, 6))


def test_interleaved_chunks_go_round_the_stages() -> None:
    found = layout(Degrees(1, 1, 2, 1, chunks=3))
    assert [chunk_names(process) for process in found.processes] == [
        ["vit 0/1"],
        ["llm 0/6", "llm 2/6", "llm 4/6"],
        ["llm 1/6", "llm 3/6", "llm 5/6"],
        ["dit 0/1"],
    ]
    there, back = ((1, 2),), ((2, 1),)
    assert edges(found) == {
        "vit0 llm0": ((0, 1),),
        "llm5 dit0": ((2, 3),),
        **{f"llm{n} llm{n + 1}": back if n % 2 else there for n in range(5)},
    }
    assert found.ranks(found.processes[1].chunks[1]) == (1,)
    first, last = found.processes[1].chunks[0], found.processes[2].chunks[2]
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)


def test_colocated_modules_share_their_ranks() -> None:
    found = layout(Degrees(2, 2, 1, 2, second_encoder=2, colocated=True))
    names = ["vit 0/1", "vit_more 0/1", "llm 0/1", "dit 0/1"]
    assert [chunk_names(process) for process in found.processes] == [names] * 2
    assert [str(process) for process in found.processes] == [
        f"vit + vit_more + llm + dit rank {rank}" for rank in range(2)
    ]
    assert [m.name for m in found.processes[0].modules] == ["vit", "vit_more", "llm", "dit"]
    assert found.stages == (((0,), (1,)),)
    assert found.is_uniform
    assert (found.message_edges, found.collective_edges, found.collectives) == ((), found.edges, ((0, 1),))
    chain = layout(Degrees(1, 1, 2, 1, chunks=2))
    assert not chain.is_uniform
    assert (chain.message_edges, chain.collective_edges, chain.collectives) == (chain.edges, (), ())
    with pytest.raises(TopologyError, match=r"needs 2 processes \(vit \+ vit_more \+ llm \+ dit dp 2\)"):
        found.require_world_size(4)
    ranks = layout(Degrees(2, 2, 1, 2, colocated=True, tp=(2, 2, 2)))
    assert ranks.stages == (((0, 1), (2, 3)),)
    assert ranks.collectives == ((0, 2), (1, 3))
    assert str(ranks.processes[3]) == "vit + llm + dit rank 1 tp rank 1"


def test_modules_may_be_missing() -> None:
    found = Topology.of(parsed(job_data(Degrees(0, 2, 2, 0), generation={"ratio": "0"})).spec)
    assert edges(found) == {"llm0 llm1": ((0, 1), (2, 3))}


def test_wrong_number_of_processes_names_the_command() -> None:
    found = layout(Degrees(1, 2, 2, 1))
    found.require_world_size(6)
    with pytest.raises(TopologyError, match=r"WORLD_SIZE is 4 .* needs 6 .*torchrun --standalone --nproc-per-node 6"):
        found.require_world_size(4)


def test_backbones_with_devices_of_their_own_alone_have_sequences_to_share() -> None:
    colocated = job_data(Degrees(2, 2, 1, 2, colocated=True))
    colocated["execution"]["modules"] = [m | {"sp": 2} for m in colocated["execution"]["modules"]]
    towers = contrastive()
    towers["execution"]["modules"][1]["sp"] = 2
    refused = {"vit": with_modules(vit={"sp": 2}), "dit": with_modules(dit={"sp": 2}), "text": towers, "llm": colocated}
    for name, data in refused.items():
        with pytest.raises(TopologyError, match=f"module {'vit' if name == 'llm' else name} has sp 2; .* set sp to 1"):
            Topology.of(parsed(data).spec)


def with_execution(**changes: Any) -> dict[str, Any]:
    data = job_data(Degrees(1, 1, 1, 1))
    data["execution"].update(changes)
    return data


def whole_ranks() -> dict[str, Any]:
    """Of trainers whose ranks run an encoder and the backbone."""
    data = with_execution(identity_routing=True)
    data["execution"]["modules"] = [m for m in data["execution"]["modules"] if m["kind"] != "generator"]
    data["stream"]["generation"] = {"ratio": "0"}
    return data


def with_modules(*added: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    """A job with further modules, and changed fields of those that it has."""
    data = job_data(Degrees(1, 1, 1, 1))
    modules = [{**m, **changes.get(m["name"], {})} for m in data["execution"]["modules"]]
    data["execution"]["modules"] = [*modules, *added]
    return data


def contrastive() -> dict[str, Any]:
    towers = [{"name": m, "kind": "tower", "modality": m, "pp": 2} for m in ("image", "text")]
    data = with_execution(modules=towers, layout={"kind": "contrastive"})
    data["stream"] |= {"contrastive_batch": 4, "packing": {"enabled": False}, "generation": {"ratio": "0"}}
    return data


def grouped(dp: int, most: int, least: int = 1, **fields: Any) -> dict[str, Any]:
    data = with_modules(llm={"memory": {"budget_bytes": 4096, "unit_bytes": 1}, "dp": dp, **fields})
    exchange = [{"degree": 1 << p, "unit_ps": p} for p in range(1, most.bit_length()) if 1 << p >= least]
    data["execution"]["layout"] = {"kind": "grouped", "min_degree": least, "max_degree": most, "exchange": exchange}
    return data


def test_ranks_of_a_backbone_may_share_sequences_in_aligned_groups() -> None:
    found = Topology.of(parsed(grouped(8, 4, least=2)).spec)
    ranks = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 2, 3), (4, 5, 6, 7)]
    assert [(g.ranks, g.members) for g in found.sequence_groups] == [(r, tuple(1 + n for n in r)) for r in ranks]
    assert found.lockstep_ranks == found.plan_checked_ranks == tuple(range(1, 9))
    alone = Topology.of(parsed(grouped(2, 1)).spec)
    assert (alone.sequence_groups, alone.lockstep_ranks) == ((), (1, 2))
    assert not layout(Degrees(1, 2, 1, 1)).lockstep_ranks


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_modules(vit={"padded": True}), "module vit is padded; this trainer does not pad items, leave padded out"),
        (whole_ranks(), "gives each module processes of its own: leave identity_routing out"),
    ],
)
def test_what_servers_plan_and_this_trainer_does_not_run_is_refused(data: dict[str, Any], message: str) -> None:
    spec = parsed(data).spec
    with pytest.raises(TopologyError, match=message):
        Topology.of(spec)


def test_the_last_stages_of_towers_meet() -> None:
    found = Topology.of(parsed(contrastive()).spec)
    assert [process.stage for process in found.processes] == [0, 1, 0, 1]
    assert found.collectives == ((1, 3),)
    assert edges(found) == {"image0 image1": ((0, 1),), "text0 text1": ((2, 3),)}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_policies_that_change_only_the_plan_are_run(schedule: str) -> None:
    memory = {"memory": {"budget_bytes": 4096, "unit_bytes": 1}}
    data = with_modules(vit={**memory, "balance": "lpt"}, llm={**memory, "packing": "best_fit"}, dit=memory)
    data["execution"]["layout"] = {"kind": "pipelined", "schedule": schedule}
    assert Topology.of(parsed(data).spec).world_size == 3


def test_names_of_processes_and_the_words_of_a_wrong_number_of_processes() -> None:
    found = layout(Degrees(2, 2, 3, 1))
    processes = ["vit rank 0", "vit rank 1"]
    processes += [f"llm rank {rank} stage {stage}" for rank in range(2) for stage in range(3)]
    assert [str(process) for process in found.processes] == [*processes, "dit rank 0"]
    with pytest.raises(TopologyError) as caught:
        found.require_world_size(10)
    assert str(caught.value) == (
        "WORLD_SIZE is 10 but the job needs 9 processes (vit dp 2, llm dp 2 x pp 3, dit dp 1); start it with `torchrun "
        "--nnodes NODES --nproc-per-node PROCESSES -m trainclient train ...` where NODES x PROCESSES = 9, on one "
        "machine: `torchrun --standalone --nproc-per-node 9 -m trainclient train ...`"
    )
    with pytest.raises(TopologyError, match=r"4 processes \(vit dp 1, llm dp 1 x pp 2, dit dp 1\)"):
        layout(Degrees(1, 1, 2, 1)).require_world_size(3)
    assert str(layout(Degrees(1, 1, 2, 1)).processes[2]) == "llm rank 0 stage 1"
    data = job_data(Degrees())
    data["execution"]["modules"][0]["sp"] = 2
    with pytest.raises(TopologyError) as caught:
        Topology.of(parsed(data).spec)
    assert str(caught.value) == (
        "module vit has sp 2; this trainer splits the sequences of backbones alone, on devices of their own: set sp to "
        "1 and raise dp or tp instead"
    )
