"""What is wrong with a fleet, by what its servers say of themselves: pure, from answers to findings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from disttrain.v1.admin_service_pb2 import GetDiagnosticsResponse, GetMetricsResponse
from disttrain.v1.data_service_pb2 import GetDatasetInfoResponse, GetServerInfoResponse

from dataserver.addresses import is_loopback, split_address
from dataserver.dataset import printable

CLOCK_S: Final = 5.0
"""Clocks that differ by more make logs hard to read, and certificates valid too early or too late."""
EXPIRES_S: Final = 14 * 86400
"""A certificate that expires sooner is to be renewed now."""
FILES_PER_STREAM: Final = 8
"""Descriptors for each stream: its connection (at most half of all are for these), shards, blocks of shared memory."""
OWN_FILES: Final = 512
"""Descriptors that a server needs beside its streams."""
FULL: Final = 0.9
"""Share of a limit beyond which there is too little room."""
REMADE: Final = 0.1
"""Plans and windows that are made once more, for each plan, beyond which the memory for jobs is too small."""
LEAST_REMADE: Final = 10
"""Plans and windows that may be made again without a finding, as happens when ranks reconnect."""
LEAST_FREE_BYTES: Final = 1 << 30
MIB: Final = 1 << 20
SHORT: Final = 12
"""Characters of a digest that are shown."""
MOST_SHOWN: Final = 400
"""Characters of a text of a server's that are shown."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one server says of itself."""

    address: str
    info: GetServerInfoResponse
    datasets: GetDatasetInfoResponse
    metrics: GetMetricsResponse
    diagnostics: GetDiagnosticsResponse
    clock_s: float
    """Seconds that the server's clock is ahead of ours."""
    doubt_s: float
    """How much of that the way there and back may have made."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with some servers."""

    servers: tuple[str, ...]
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{', '.join(self.servers)}: {self.what}\n    {self.remedy}"


def check(fleet: Sequence[Seen], now: float, *, insecure: bool = False) -> Iterator[Finding]:
    """Everything that is wrong, what concerns the whole fleet first.

    Args:
        fleet: the servers that answered.
        now: our clock, in seconds since 1970.
        insecure: whether it is known and wanted that others may reach servers without encryption or credentials.
    """
    yield from _releases(fleet)
    yield from _data(fleet)
    yield from _access(fleet)
    for one in fleet:
        yield from _clock(one)
        yield from _security(one, now, insecure)
        yield from _limits(one)
        yield from _memory(one)
        yield from _data_connections(one)


def _releases(fleet: Sequence[Seen]) -> Iterator[Finding]:
    yield from _differing(
        {one.address: f"release {one.info.release}, build {one.diagnostics.build[:SHORT]}" for one in fleet},
        "servers of several builds share no plans: finish the rolling upgrade, or install the same release everywhere",
    )
    yield from _differing(
        {one.address: f"content digest {one.info.content_digest[:SHORT]}" for one in fleet},
        "they decode images differently, and a trainer uses those of one digest alone: install the same versions of "
        "the image libraries everywhere",
    )
    yield from _differing(
        {one.address: f"audio digest {one.info.audio_digest[:SHORT]}" for one in fleet if one.info.audio_digest},
        "they decode audio differently, and a trainer uses clips of one digest alone: install the same versions of "
        "soundfile and soxr everywhere",
    )
    yield from _differing(
        {one.address: f"video digest {one.info.video_digest[:SHORT]}" for one in fleet if one.info.video_digest},
        "they decode video differently, and a trainer uses videos of one digest alone: install the same version of av "
        "everywhere",
    )
    yield from _differing(
        {one.address: f"sound digest {one.info.sound_digest[:SHORT]}" for one in fleet if one.info.sound_digest},
        "they decode the sound of videos differently, and a trainer uses that of one digest alone: install the same "
        "versions of av and soxr everywhere",
    )
    for kind in ("order_versions", "content_versions", "plan_versions"):
        if fleet and not set.intersection(*(set(getattr(one.info, kind)) for one in fleet)):
            everybody = tuple(one.address for one in fleet)
            yield Finding(everybody, f"they have no {kind} in common", "no job is served by all: finish the upgrade")
    draining = tuple(one.address for one in fleet if one.info.draining)
    if draining:
        yield Finding(draining, "draining", "wait until they have ended and were started again")


def _data(fleet: Sequence[Seen]) -> Iterator[Finding]:
    remedy = "a job is served by servers that have the same of these alone: configure all servers alike"
    found = {one.address: _named(one) for one in fleet}
    for name in sorted(set().union(*found.values())):
        texts = {address: f"{name} {entries.get(name, 'missing')}" for address, entries in found.items()}
        yield from _differing(texts, remedy)


def _access(fleet: Sequence[Seen]) -> Iterator[Finding]:
    said = [one.diagnostics for one in fleet]
    if all(one.access_digest or not one.authenticated for one in said):  # an older release does not say
        yield from _differing(
            {one.address: f"access digest {one.diagnostics.access_digest[:SHORT] or 'none'}" for one in fleet},
            "what was revoked at one may get in at another: give all the same --client-ca, --token-file and --policy",
        )


def _named(one: Seen) -> dict[str, str]:
    """The datasets, tokenizers and transforms of a server, each with what has to be the same everywhere."""
    found = {}
    for dataset in one.datasets.datasets:
        quarantine = f", quarantine {dataset.quarantine[:SHORT]}" if dataset.quarantine else ""
        found[f"dataset {dataset.name}"] = f"fingerprint {dataset.fingerprint[:SHORT]}{quarantine}"
    for tokenizer in one.datasets.tokenizers:
        found[f"tokenizer {tokenizer.name}"] = f"digest {tokenizer.digest[:SHORT]}"
    for transform in one.info.transforms:
        found[f"transform {transform.name}"] = f"version {transform.version}"
    return found


def _differing(texts: Mapping[str, str], remedy: str) -> Iterator[Finding]:
    """Findings for all servers where they differ; those that most agree on come first.

    Args:
        texts: what has to be the same, by address.
        remedy: what to do where it is not.
    """
    groups: dict[str, list[str]] = {}
    for address, text in texts.items():
        groups.setdefault(text, []).append(address)
    if len(groups) > 1:
        for text, members in sorted(groups.items(), key=lambda group: -len(group[1])):
            yield Finding(tuple(members), text, remedy)


def _clock(one: Seen) -> Iterator[Finding]:
    if abs(one.clock_s) - one.doubt_s > CLOCK_S:
        way = "ahead of" if one.clock_s > 0 else "behind"
        yield Finding(
            (one.address,), f"clock {abs(one.clock_s):.0f} s {way} this machine's", "run NTP on both machines"
        )


def _security(one: Seen, now: float, insecure: bool) -> Iterator[Finding]:
    said = one.diagnostics
    if not insecure and not is_loopback(split_address(one.address)[0]):
        if not said.encrypted:
            yield Finding((one.address,), "nothing is encrypted", "start it with --tls-cert and --tls-key")
        if not said.authenticated:
            yield Finding((one.address,), "everybody is let in", "start it with --client-ca or --token-file")
    for problem in said.unused_files:
        yield Finding(
            (one.address,),
            printable(problem, MOST_SHOWN),
            "correct the file, which it reads again by itself: until then it goes by what it read before, and what was "
            "revoked since is not",
        )
    if said.HasField("certificate_expiry"):
        left_s = said.certificate_expiry.seconds - now
        if left_s < EXPIRES_S:
            end = datetime.fromtimestamp(said.certificate_expiry.seconds, UTC).isoformat()
            yield Finding(
                (one.address,),
                f"its certificate expires in {left_s / 86400:.1f} days, at {end}",
                "replace the files of --tls-cert and --tls-key; it reads them again by itself",
            )


def _limits(one: Seen) -> Iterator[Finding]:
    said, needed = one.diagnostics, FILES_PER_STREAM * one.info.max_streams + OWN_FILES
    if said.max_open_files < needed:
        yield Finding(
            (one.address,),
            f"it may open {said.max_open_files} files; {needed} are wanted for {one.info.max_streams} streams",
            f"raise the hard limit (ulimit -Hn {needed}, LimitNOFILE={needed} of systemd), or lower --max-streams",
        )
    if said.open_files > FULL * said.max_open_files:
        yield Finding(
            (one.address,),
            f"{said.open_files} of {said.max_open_files} files are open",
            "see who is connected (ss -tp), raise the limit of files, or start more servers",
        )
    if one.metrics.open_streams >= one.info.max_streams:
        yield Finding(
            (one.address,), f"all {one.info.max_streams} streams are open", "raise --max-streams, or start more servers"
        )
    if said.live_peers < said.known_peers:
        yield Finding(
            (one.address,),
            f"{said.live_peers} of {said.known_peers} peers answer it",
            "start the others, correct --peers, or let servers in by --policy; its log says why each does not answer",
        )


def _memory(one: Seen) -> Iterator[Finding]:
    cached = one.metrics.cached
    used = cached.jobs + cached.tables + cached.windows + cached.plans
    if one.metrics.HasField("remade"):  # a full cache is normal where nothing has to be made again
        remade, plans = one.metrics.remade, one.metrics.plans_by_source.fetched
        plans += sum(times.plans for times in one.metrics.plan_times)
        again = remade.plans + remade.windows
        if again > max(REMADE * plans, LEAST_REMADE):
            yield Finding(
                (one.address,),
                f"{again} plans and shuffle windows were made again soon after they were dropped, of {plans} plans "
                f"since its start; {cached.limit // MIB} MiB are for jobs",
                "raise --job-bytes, or lower shuffle_window of new jobs",
            )
    elif cached.limit and used > FULL * cached.limit:
        yield Finding(
            (one.address,),
            f"{used // MIB} of {cached.limit // MIB} MiB for jobs are used, {cached.windows // MIB} by shuffle windows",
            "it may have to read and sort windows again: raise --job-bytes, or lower shuffle_window of the jobs",
        )
    if one.diagnostics.HasField("cache_free_bytes") and one.diagnostics.cache_free_bytes < LEAST_FREE_BYTES:
        yield Finding(
            (one.address,),
            f"{one.diagnostics.cache_free_bytes // MIB} MiB are left on the disk of --cache-dir",
            "make room, or name another folder: statistics are computed again at each start otherwise",
        )
    if (holds := one.diagnostics.block_bytes) < (wanted := one.diagnostics.wanted_block_bytes):
        yield Finding(
            (one.address,),
            f"its caches hold {holds // MIB} MiB of blocks from object stores; {-(-wanted // MIB)} MiB are wanted for "
            "its part of the default shuffle window",
            "raise --block-memory-bytes, or --block-cache-bytes with a --block-cache-dir, or start more servers: "
            "shards are read from the store several times otherwise",
        )


def _data_connections(one: Seen) -> Iterator[Finding]:
    if (left := one.metrics.direct_fallbacks) > 0:
        yield Finding(
            (one.address,),
            f"{left} streams left their data connection for gRPC, since its start",
            "its log names the causes: open its data port (--data-listen) in firewalls, and no proxy may lie between",
        )


def summary(fleet: Sequence[Seen], silent: Mapping[str, str]) -> str:
    """One line on who answered."""
    releases = sorted({one.info.release for one in fleet})
    names = sorted({entry.name for one in fleet for entry in one.datasets.datasets})
    transforms = sorted({f"{entry.name}={entry.version}" for one in fleet for entry in one.info.transforms})
    about = f"; release {', '.join(releases)}; datasets {', '.join(names) or 'none'}" if fleet else ""
    about += f"; transforms {', '.join(transforms)}" if transforms else ""
    return f"{len(fleet)} of {len(fleet) + len(silent)} servers answer{about}"
