"""Measures of runs from the servers that own them; what these do not give in time, or not right, is left out."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from time import monotonic

import grpc
import numpy as np
from disttrain.v1.peer_service_pb2 import FetchMeasuresResponse

from dataserver.jobs import Runs, always_wanted, measure_shards
from dataserver.planning.measure import Measure, equal_measures
from dataserver.serving.metrics import PlanSource
from dataserver.serving.peers import fetching
from dataserver.serving.peers.build import build_id
from dataserver.serving.peers.fetching import (
    LOOK_S,
    FailedError,
    awaited,
    begun,
    check_waiting,
    failure_of,
    leave_alone,
)
from dataserver.serving.peers.measure_message import UnfitMeasureError, measure_from_message, measures_request
from dataserver.serving.peers.membership import Peers
from dataserver.serving.peers.peer import Peer


@dataclass(slots=True)
class _Share:
    """The runs that one peer owns."""

    left: deque[int] = field(default_factory=deque)
    """Those that it is still to be asked for; the first one is being asked for."""
    call: "grpc.Future[FetchMeasuresResponse] | None" = None
    until: float = 0.0
    """When the call is late, on the monotonic clock."""
    found: dict[int, Measure] = field(default_factory=dict)

    def cancel(self) -> None:
        """Give up what is being asked for."""
        if self.call is not None:
            self.call.cancel()


class MeasureFetcher:
    """The fleet as it measures: `jobs.runs.Owners`."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._random = SystemRandom()

    def mine(self, name: str, runs: Sequence[int]) -> list[int]:
        """Those of some runs of a measure that this server owns."""
        return [run for run in runs if self._peers.ranked(name, run)[0] is None]

    def fetch(self, runs: Runs, wanted: Sequence[int], progress: Callable[[int], object]) -> dict[int, Measure]:
        """Some runs from their owners, all of which are asked at once, each for one run at a time.

        What a peer gave before it failed counts, but for one that gave something wrong.
        """
        woken = threading.Event()
        shares: dict[Peer, _Share] = {}
        for run in wanted:
            owner = self._peers.ranked(runs.name, run)[0]
            if owner is not None:
                shares.setdefault(owner, _Share()).left.append(run)
        ended: list[_Share] = []
        woken.set()
        try:
            while shares:
                woken.wait(LOOK_S)
                woken.clear()
                progress(sum(len(runs.shards(run)) for share in (*ended, *shares.values()) for run in share.found))
                for peer, share in tuple(shares.items()):
                    if not self._advance(peer, share, runs, woken):
                        ended.append(shares.pop(peer))
        finally:
            for share in shares.values():
                share.cancel()
        return {run: measure for share in ended for run, measure in share.found.items()}

    def _asked(
        self, peer: Peer, runs: Runs, run: int, woken: threading.Event
    ) -> "tuple[grpc.Future[FetchMeasuresResponse], float]":
        request = measures_request(runs.dataset.fingerprint, runs.rules, run, build_id())
        call = begun(lambda: peer.plans.FetchMeasures.future(request, timeout=fetching.FETCH_S))
        call.add_done_callback(lambda _: woken.set())
        return call, monotonic() + fetching.FETCH_S

    def _advance(self, peer: Peer, share: _Share, runs: Runs, woken: threading.Event) -> bool:
        """Look at the call to a peer, and ask for its next run; whether there is one."""
        try:
            if share.call is not None and not share.call.done():
                check_waiting(peer, share.until)
                return True
            if share.call is not None:
                share.found[share.left[0]] = self._checked(peer, share.call, share, runs)
                share.left.popleft()
            if share.left:
                share.call, share.until = self._asked(peer, runs, share.left[0], woken)
            return bool(share.left)
        except FailedError as failure:
            share.cancel()
            if failure.source is PlanSource.WRONG:
                share.found.clear()
            rows = runs.rows(share.left[0])
            what = f"measure of shards {rows.start} to {rows.stop - 1} of {runs.dataset.index_folder}"
            leave_alone(self._peers, peer, failure, runs.name, what, "what it owns is measured here")
            return False

    def _checked(self, peer: Peer, call: "grpc.Future[FetchMeasuresResponse]", share: _Share, runs: Runs) -> Measure:
        """What a peer answered, of which one shard is measured here, too. Nobody knows before which one."""
        run = share.left[0]
        try:
            message = awaited(call, peer, share.until, always_wanted)
        except grpc.RpcError as error:
            raise failure_of(error) from None
        shards = runs.shards(run)
        samples = np.array([shard.num_samples for shard in shards], np.int64)
        try:
            found = measure_from_message(runs.name, runs.identities[runs.rows(run)], samples, build_id(), message)
        except UnfitMeasureError as error:
            raise FailedError(PlanSource.WRONG, str(error)) from error
        at = self._random.randrange(len(shards))
        (made,) = measure_shards([shards[at]], runs.rules)
        if not equal_measures(found.take(np.array([at])), made):
            raise FailedError(PlanSource.WRONG, f"shard {shards[at].name} has another measure here")
        return found
