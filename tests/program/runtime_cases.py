"""Jobs and processes for the tests of the disaggregated runtime.

The processes of a pool fork from one that has imported everything, which is forked itself (`cli.forked`). For each line
that one gets, it joins the others through torchrun's environment variables, runs one step of every case, saves the
gradients of its module, and answers with a line.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch._dynamo  # the first layer or optimizer would import it, in each process
import torch.distributed as dist
from builders.jobs import compose, module
from cli.forked import forks
from ports import free_ports
from program.nccl_record import Recorder
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as dtensor_debug

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.job.spec import JobSpec
from trainclient.client import Batch, DataClient, as_torch
from trainclient.layouts.registry import LAYOUTS, layout_part
from trainclient.models.parameters import units
from trainclient.modules import Target
from trainclient.program.assembly import assemble
from trainclient.program.clock import Stopwatch
from trainclient.program.runner import LossWeights
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups, process_groups
from trainclient.training.config import TrainConfig
from trainclient.training.loop import Trainer
from trainclient.training.model_config import Sharding
from trainclient.training.models import Models
from trainclient.training.rank import _writer
from trainclient.training.sharded_parameters import ShardedParameters, shard_parameters
from trainclient.training.signals import StopSignals
from trainclient.training.streams import Streams
from trainclient.training.tied_heads import TiedHeads

WORKERS_TIMEOUT_S = 200
CLOSE_TIMEOUT_S = 20
DONE = "done\n"


@dataclass(frozen=True)
class Degrees:
    """Data-parallel degrees of the modules, and stages and chunks of the backbone; 0 leaves a module out.

    The second encoder and generator handle the images of the dataset `more`.
    """

    encoder: int = 1
    backbone: int = 2
    stages: int = 2
    generator: int = 1
    chunks: int = 1
    second_encoder: int = 0
    second_generator: int = 0
    frozen: tuple[str, ...] = ()
    """Names of modules."""
    recompute: tuple[str, ...] = ()
    """Names of modules that compute their blocks again."""
    colocated: bool = False
    """Whether all ranks run all modules."""
    retained: tuple[int, int] = (0, 0)
    """Of these, the patches of each encoder and the tokens of the backbone that a rank keeps at once; 0: all."""
    tp: tuple[int, int, int] = (1, 1, 1)
    """Tensor-parallel degrees of encoder, backbone and generator."""
    group: int = 0
    """Ranks of the largest group that shares sequences; 0 where every rank has its own."""
    sp: int = 1
    """Processes that share all sequences of a rank of the backbone."""

    @property
    def world_size(self) -> int:
        vit, llm, dit = self.tp
        if self.colocated:
            return self.backbone * llm
        seconds = self.second_encoder + self.second_generator
        backbone = self.backbone * self.stages * self.sp * llm
        return self.encoder * vit + backbone + self.generator * dit + seconds

    @property
    def single(self) -> "Degrees":
        """The same modules with one process each, all of them trained, and nothing computed again."""
        return Degrees(*(min(1, n) for n in (self.encoder, self.backbone, self.stages, self.generator)), 1,
                       min(1, self.second_encoder), min(1, self.second_generator))  # fmt: skip

    def __str__(self) -> str:
        seconds = f", second encoder {self.second_encoder}, second generator {self.second_generator}"
        return (
            f"encoder {self.encoder}, backbone {self.backbone} x {self.stages} x {self.chunks}, generator "
            f"{self.generator}{seconds if self.second_encoder or self.second_generator else ''}"
            f"{', frozen ' + ' and '.join(self.frozen) if self.frozen else ''}"
            f"{', colocated' if self.colocated else ''}"
            f"{f', retained {self.retained}' if any(self.retained) else ''}"
            f"{', again ' + ' and '.join(self.recompute) if self.recompute else ''}"
            f"{', tp ' + ' '.join(map(str, self.tp)) if max(self.tp) > 1 else ''}"
            f"{f', groups to {self.group}' if self.group else ''}"
            f"{f', sp {self.sp}' if self.sp > 1 else ''}"
        )


SINGLE = Degrees(1, 1, 1, 1)


def job_data(
    degrees: Degrees,
    *,
    dataset: str = "pairs",
    balanced: bool = True,
    balance: str = "lpt",
    extra_in_flight: int = 0,
    layout: dict[str, Any] | None = None,
    units: int = 96,
    **stream: Any,
) -> dict[str, Any]:
    """A small job; what it leaves out is for the servers to fill in. In groups a rank holds `units` tokens."""
    balance = balance if balanced else "none"
    more = {"datasets": ["more"], "balance": balance}
    modules = [
        module("encoder", dp=degrees.encoder, balance=balance),
        module("encoder", "vit_more", dp=degrees.second_encoder, **more),
        module("backbone", dp=degrees.backbone, pp=degrees.stages, balance=balance),
        module("generator", dp=degrees.generator, balance=balance),
        module("generator", "dit_more", dp=degrees.second_generator, **more),
    ]
    pipelined = {"kind": "pipelined", "order": "search" if balanced else "none"}
    pipelined |= {"schedule": "interleaved", "chunks": degrees.chunks} if degrees.chunks > 1 else {}
    waits = {"extra_in_flight": extra_in_flight} if extra_in_flight else {}
    pipelined |= waits
    colocated = {"kind": "colocated", "ranks_per_node": 2}
    exchange = [{"degree": 1 << p, "unit_ps": 10**9 * p} for p in range(1, degrees.group.bit_length())]
    grouped = {"kind": "grouped", "max_degree": degrees.group, "exchange": exchange, **waits}
    several = degrees.second_encoder or degrees.second_generator
    fields = {
        "datasets": [{"name": dataset}, *([{"name": "more"}] if several else [])],
        "sizing": {"patch": 8, "merge": 2, "max_patches": 64},
        "seq_len": 192,
        "global_batch": 8,
        "generation": {"ratio": "0.5", "query_tokens": 4},
        "seed": 7,
        "layout": {**(grouped if degrees.group else colocated if degrees.colocated else pipelined), **(layout or {})},
        "end": {"steps": 6},
    }
    tp = dict(zip(("vit", "llm", "dit"), degrees.tp, strict=True))
    modules = [m | {"tp": tp[m["name"]]} if tp.get(m["name"], 1) > 1 else m for m in modules]
    if degrees.sp > 1:
        modules = [m | {"sp": degrees.sp} if m["kind"] == "backbone" else m for m in modules]
    for kind, retained in zip(("encoder", "backbone"), degrees.retained, strict=True):
        memory = {"budget_bytes": min(retained, fields["seq_len"]), "unit_bytes": 1, "step_bytes": retained}
        of = [m["name"] for m in modules if retained and m["kind"] == kind and m["name"] not in degrees.frozen]
        modules = [m | {"memory": memory} if m["name"] in of else m for m in modules]
    if degrees.group:
        memory = {"budget_bytes": units, "unit_bytes": 1}
        modules = [m | {"memory": memory} if m["kind"] == "backbone" else m for m in modules]
    marks = {"frozen": degrees.frozen, "recompute": degrees.recompute}
    modules = [m | {key: True for key, names in marks.items() if m["name"] in names} for m in modules if m["dp"]]
    return compose(modules, **{**fields, **stream})


@dataclass(frozen=True)
class Case:
    """One run of step 0."""

    name: str
    servers: str
    job: dict[str, Any]
    dtype: str = "float64"
    text_weight: float = 1.0
    image_weight: float = 1.0
    modules: dict[str, Any] = field(default_factory=dict)
    """As in a trainer's configuration, as is the next."""
    sharding: dict[str, str] = field(default_factory=dict)
    """Of the modules, by their kinds."""
    training: dict[str, Any] = field(default_factory=dict)
    """Further configuration of a trainer that runs the job from its first step, or goes on; by default, only the
    gradients of the first step are found."""
    held_out: dict[str, Any] | None = None
    """A complete job on which such a trainer is evaluated."""
    contrastive: dict[str, Any] = field(default_factory=dict)
    """As in a trainer's configuration."""
    other_plan_rank: int = -1
    """Global rank whose views claim to be of another plan."""
    recorded: bool = False
    """Whether all processes note what they give to their groups, in files of their ranks (`nccl_record`); as the first
    case has it."""
    late_for: str = ""
    """The collective of its first forward or backward for which the second rank of the backbone is late: gather, sum;
    leaves what the ranks of the backbone waited for, and the delay, in files of the case and rank."""

    @property
    def config(self) -> TrainConfig:
        weights = {"text_weight": self.text_weight, "image_weight": self.image_weight}
        sharded = {kind: {"sharding": sharding} for kind, sharding in self.sharding.items()}
        fields = {
            **weights,
            **sharded,
            "progress": False,
            "dtype": self.dtype,
            "modules": self.modules,
            "contrastive": self.contrastive,
            "servers": self.servers,
        }
        return TrainConfig.model_validate({**fields, **self.training})

    @property
    def parsed(self) -> Job:
        return parse_job(self.job)

    def batches(self, module: str, rank: int, tensors: Sequence[str] | None = None) -> Iterator[Batch]:
        """The views of one rank of step 0."""
        with DataClient(self.servers, self.parsed, module, rank, tensors=tensors) as client:
            for batch in client:
                yield batch
                if batch.last_of_step:
                    return


class Pool:
    """Processes that have imported torch once and run one layout's cases after the other's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mother: BaseProcess | None = None
        self._ranks: dict[int, Rank] = {}

    def run(self, cases: Sequence[Case], folder: Path) -> dict[str, dict[str, torch.Tensor]]:
        """Run the cases, which share one layout; returns each case's gradients by their whole name."""
        for errors in self.outcomes(cases, folder):
            assert errors is None, errors
        results: dict[str, dict[str, torch.Tensor]] = {case.name: {} for case in cases}
        for case in cases:
            for path in sorted(folder.glob(f"{case.name}.*.pt")):
                found = torch.load(path)
                for name in found.keys() & results[case.name].keys():  # of other ranks
                    assert torch.equal(found[name], results[case.name][name]), name
                results[case.name] |= found
        return results

    def outcomes(self, cases: Sequence[Case], folder: Path) -> list[str | None]:
        """What each process that failed, and so ended, wrote to stderr; None of those that ran the cases."""
        world = Topology.of(cases[0].parsed.spec).world_size
        script = folder / "cases.json"
        script.write_text(json.dumps([asdict(case) for case in cases]))
        (port,) = free_ports(1)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "CASES": str(script)}
        shared["MUTATION_TEST_FILE"] = os.environ.get("MUTATION_TEST_FILE", "")
        for rank in range(world):
            print(json.dumps(shared | {"RANK": str(rank)}), file=self._rank(rank).talk, flush=True)
        with ThreadPoolExecutor(world) as threads:
            try:
                return list(threads.map(self._outcome, range(world), timeout=WORKERS_TIMEOUT_S))
            except TimeoutError:
                self.close()
                raise

    def close(self) -> None:
        """End the processes: those that wait for cases by themselves, others by force."""
        for rank in self._ranks.values():
            rank.talk.close()  # so that they end beside each other
        for rank in self._ranks.values():
            rank.end()
        self._ranks.clear()
        if self._mother is not None:
            self._requests.close()
            self._mother.kill()
            self._mother.join()
            self._mother = None

    def _rank(self, rank: int) -> "Rank":
        """The process of a rank, started if there is none."""
        if self._mother is None:
            self._requests, theirs = socket.socketpair()
            with theirs:
                self._mother = forks().Process(target=fork_ranks, args=(theirs,), daemon=True)
                self._mother.start()
        if rank not in self._ranks:
            ours, theirs = socket.socketpair()
            with theirs, self._errors(rank).open("w") as errors:
                socket.send_fds(self._requests, [b"f"], [theirs.fileno(), errors.fileno()])
            self._ranks[rank] = Rank.of(ours)
        return self._ranks[rank]

    def _outcome(self, rank: int) -> str | None:
        if self._ranks[rank].talk.readline() == DONE:
            return None
        self._ranks.pop(rank).end()
        return self._errors(rank).read_text()

    def said(self, rank: int) -> str:
        """What a process wrote to stderr, in all cases so far."""
        return self._errors(rank).read_text()

    def _errors(self, rank: int) -> Path:
        return self._folder / f"{rank}.stderr"


@dataclass(frozen=True)
class Rank:
    """A process of a pool, which has forked from one that has imported everything."""

    pidfd: int
    talk: TextIO

    @classmethod
    def of(cls, connection: socket.socket) -> "Rank":
        """The process at the other end, which says who it is first."""
        with connection:
            talk = connection.makefile("rw")
        return cls(os.pidfd_open(int(talk.readline())), talk)

    def end(self) -> None:
        """End it: by itself if it waits for cases, otherwise by force."""
        self.talk.close()
        if not select.select([self.pidfd], [], [], CLOSE_TIMEOUT_S)[0]:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)


@contextmanager
def as_nccl_takes_it() -> Iterator[None]:
    """Refuse what would wait for ever beside NCCL: a process that makes a group which it is not in splits NCCL's
    communicator, for which it needs all processes; but those that are in a group over gloo split none."""
    new_group = dist.new_group

    def checked(ranks: list[int] | None = None, *rest: Any, **named: Any) -> Any:
        by_members_alone = named.get("use_local_synchronization", False)
        assert ranks is None or named.get("backend") is None or by_members_alone, f"{ranks} {named}"
        return new_group(ranks, *rest, **named)

    dist.new_group = checked
    try:
        yield
    finally:
        dist.new_group = new_group


def joined(jobs: Sequence[JobSpec]) -> JobSpec:
    """The first job, with a backward in all modules that run one in any: what processes join each other for."""
    execution = jobs[0].execution
    same = zip(*(job.execution.modules for job in jobs), strict=True)
    modules = tuple(next((m for m in found if m.runs_backward), found[0]) for found in same)
    return jobs[0].model_copy(update={"execution": execution.model_copy(update={"modules": modules})})


def forget_meshes() -> None:
    """DTensors take a mesh of the same ranks for the one before, whose groups are gone. Torch 2.9 names no way."""
    names = [name for name in dir(dtensor_debug) if name.startswith("_clear_")]
    for name in names:
        getattr(dtensor_debug, name)()
    if not names:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def run_cases() -> None:
    """One step of each of the cases that the environment names."""
    script = Path(os.environ["CASES"])
    cases = [Case(**data) for data in json.loads(script.read_text())]
    layout = Topology.of(joined([case.parsed.spec for case in cases]))
    layout.require_world_size(int(os.environ["WORLD_SIZE"]))
    forget_meshes()
    with ExitStack() as stack:
        stack.enter_context(as_nccl_takes_it())
        recorder = Recorder()
        if cases[0].recorded:
            stack.enter_context(recorder.recording())
        made = stack.enter_context(process_groups(layout, torch.device("cpu"), timeout_s=60))
        for case in cases:
            run_case(case, made, script.parent)
        if cases[0].recorded:
            recorder.write(script.parent / f"{made.rank}.transfers")


def run_case(case: Case, made: Groups, folder: Path) -> None:
    """One case, in groups that are made; leaves gradients, waits and the sum of text losses in files of the rank."""
    layout = Topology.of(case.parsed.spec)
    groups = replace(made, process=layout.processes[made.rank])
    if case.training:
        train(case, layout, groups, folder)
        return
    spec, process = case.parsed.spec, groups.process
    models = Models.of(case.config, spec)
    modules = models.build(process, groups.device)
    holding = shard_parameters(modules, models.shardings(process), groups, bucket_bytes=100_000)
    tied = TiedHeads(models, layout, groups, timeout_s=60)
    clock = Stopwatch(groups.device, groups.waits)
    if case.late_for and process.modules[0].name == "llm":
        be_late(modules[0][1].network, case, groups, folder)
    weights = LossWeights(case.text_weight, case.image_weight)
    machine = assemble(spec, layout, process, modules, groups.communicators, weights, clock, parameters=holding)
    with Streams.open(case.servers, case.parsed, process, machine.tensors) as streams:
        if groups.rank == case.other_plan_rank:
            for client in streams.clients.values():
                client._handed_out = lambda found: replace(as_torch(found), plan_hash=bytes(32))
        assert machine.interpreter.run(streams.batches(groups)) is not None
    waited = [(e.operation.kind, e.end_ns - e.start_ns, e.waited_ns) for e in clock.executed()]
    (folder / f"{case.name}.{groups.rank}.waits").write_text(json.dumps(waited))
    (folder / f"{case.name}.{groups.rank}.loss").write_text(str(float(machine.loss_sum(Target.TEXT))))
    tied.sum(holding.gradients)
    found = {name: _whole(holding, name, value) for name, value in holding.gradients.items()}
    holding.drop()
    sharded = [m for site, m in modules if models.sharding(site.module) is not Sharding.NONE]
    assert all(isinstance(p, DTensor) for m in sharded for p in m.network.parameters()), "not gathered any more"
    torch.save(found, folder / f"{case.name}.{groups.rank}.pt")


def be_late(network: torch.nn.Module, case: Case, groups: Groups, folder: Path) -> None:
    """Have the second rank of a sharded network be late for a collective, until the first one waits for it and more."""
    begin, begun, files = groups.waits.begin, 0, [folder / f"{case.name}.{rank}.begun" for rank in range(2)]
    delay_file = folder / f"{case.name}.delay"

    def announced() -> None:
        nonlocal begun
        begin()
        begun += 1
        files[groups.process.rank].write_text("w" * begun)

    def delay(*_: Any) -> None:
        if groups.process.rank == 0 or delay_file.exists():
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not files[0].exists() or len(files[0].read_text()) <= begun:  # the first rank does the same as this one
            assert time.monotonic() < deadline
        since = time.perf_counter_ns()
        time.sleep(0.2)
        delay_file.write_text(str(time.perf_counter_ns() - since))

    groups.waits.begin = announced  # type: ignore[method-assign]
    if case.late_for == "gather":
        network.register_forward_pre_hook(delay, prepend=True)
    else:
        last = list(units(network))[-1]
        last.register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(delay) and None)


def _whole(holding: ShardedParameters, name: str, held: torch.Tensor) -> torch.Tensor:
    """A gradient; this process may hold a share of it, or a part."""
    stored = holding.stored(name, held)
    return stored.full_tensor() if isinstance(stored, DTensor) else stored


def train(case: Case, layout: Topology, groups: Groups, folder: Path) -> None:
    """Train as a process of a run does; leaves the optimizer's bytes in a file of the case and rank."""
    config, job, process = case.config, case.parsed, groups.process
    trainer = Trainer(config, job, layout, groups, None if case.held_out is None else parse_job(case.held_out))
    with Streams.open(case.servers, job, process, trainer.tensors) as streams, StopSignals(CLOSE_TIMEOUT_S) as stop:
        trainer.resume(streams)
        with closing(_writer(config, groups.rank, trainer, streams)) as writer:
            trainer.run(streams, stop, writer)
    state = {name: tensor for name, tensor in trainer._optimizer.tensors().items() if "/exp_" in name}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    (folder / f"{case.name}.{groups.rank}.bytes").write_text(str(size))


def fork_ranks(requests: socket.socket) -> None:
    """Fork a process for each request, which brings where it reads and writes lines, and its stderr."""
    torch.set_num_threads(1)
    for kind in LAYOUTS:  # the first step would import them, in each process
        import_module(f"dataserver.planning.layouts.{kind}.layout")
        for part in ("topology", "exchange"):
            layout_part(kind, part)
    gc.freeze()  # else every search for garbage goes through all that was imported, and copies its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    with requests:
        while descriptors := socket.recv_fds(requests, 1, 2)[1]:
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.dup2(descriptors[1], sys.stderr.fileno())
                requests.detach()
                run_rank(socket.socket(fileno=descriptors[0]))
            for descriptor in descriptors:
                os.close(descriptor)


def count_for_test_file() -> None:
    """Have the lines that run from now on count for the tests whose cases they are, not where the pool began."""
    if running := sys.modules["coverage"].Coverage.current():
        running.switch_context(os.environ["MUTATION_TEST_FILE"])


def run_rank(connection: socket.socket) -> NoReturn:
    """Be one process of the pool, until no more cases can come."""
    try:
        with connection, connection.makefile("rw") as talk:
            print(os.getpid(), file=talk, flush=True)
            for line in talk:
                os.environ.update(json.loads(line))
                if "coverage" in sys.modules:  # under scripts/mutate
                    count_for_test_file()
                run_cases()
                # Process groups lie in cycles, and each has a thread of gloo that wakes up 100 times a second.
                gc.collect()
                gc.freeze()  # a trainer has thawed what was imported
                print(DONE, end="", file=talk, flush=True)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # as the trainer does: an orderly exit may wait for the others
    atexit._run_exitfuncs()  # coverage's
    os._exit(0)  # taking apart all that was imported would copy its pages, for a second
