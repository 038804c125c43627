"""Which datasets may be shown: those that the fleet lists for the credentials of this process."""

import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Final

import grpc
from disttrain.v1.data_service_pb2 import GetDatasetInfoRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

from dataserver.security import Channels

AGAIN_S: Final = 10.0
"""A right that is taken away, or given, counts within this time."""
ANSWER_S: Final = 5.0


class ListedDatasets:
    """The datasets that any server lists. Thread-safe."""

    def __init__(self, names: Sequence[str], channels: Channels) -> None:
        self._names, self._channels = tuple(names), channels
        self._lock = threading.Lock()
        self._found: Mapping[str, str] = {}
        self._at = float("-inf")

    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprint of each by name; asked anew after some seconds. None where no server answers."""
        with self._lock:
            if monotonic() - self._at >= AGAIN_S:
                self._found = self._ask()
                self._at = monotonic()
            return self._found

    def _ask(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        channels = {name: self._channels.open(name) for name in self._names}
        try:
            calls = [
                DataServiceStub(channel).GetDatasetInfo.future(GetDatasetInfoRequest(), timeout=ANSWER_S)
                for channel in channels.values()
            ]
            for call in calls:
                try:
                    found.update((d.name, d.fingerprint) for d in call.result().datasets)
                except grpc.RpcError:  # the page of the fleet says which servers do not answer, and why
                    continue
        finally:
            for channel in channels.values():
                channel.close()
        return found
