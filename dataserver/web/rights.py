"""Which datasets may be shown: those that the fleet lists for the credentials of this process."""

import threading
from collections.abc import Mapping
from time import monotonic
from typing import Final

from disttrain.v1.data_service_pb2 import GetDatasetInfoRequest

from dataserver.reporting.fleet_calls import GET_DATASET_INFO, FleetChannels, Servers, ask_all

AGAIN_S: Final = 10.0
"""Servers are asked again after this time."""
VALID_S: Final = 20.0
"""A right that is taken away, or given, counts within this time."""
ANSWER_S: Final = 5.0


class ListedDatasets:
    """The datasets that any server lists. Thread-safe."""

    def __init__(self, servers: Servers) -> None:
        self._channels = FleetChannels(servers)
        self._asking = threading.Lock()
        """Held by the thread that asks servers; others go on with the last answer while it is valid."""
        self._answer: tuple[float, Mapping[str, str]] = float("-inf"), {}
        """When servers were asked, and what they said: replaced as one, so that no lock is needed to read it."""

    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprint of each by name; empty if no server answers. Asked anew after some seconds."""
        asked_at, found = self._answer
        age_s = monotonic() - asked_at
        if age_s < AGAIN_S:
            return found
        if not self._asking.acquire(blocking=age_s >= VALID_S):
            return found
        try:
            if self._answer[0] == asked_at:  # nobody else has asked meanwhile
                now = monotonic()
                self._answer = now, self._ask()
            return self._answer[1]
        finally:
            self._asking.release()

    def close(self) -> None:
        """Close the connections to the servers."""
        self._channels.close()

    def _ask(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for reply in ask_all(self._channels.opened(), GET_DATASET_INFO, GetDatasetInfoRequest(), ANSWER_S):
            if reply.message is not None:  # of the others the page of the fleet says why
                found.update((dataset.name, dataset.fingerprint) for dataset in reply.message.datasets)
        return found
