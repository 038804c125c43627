"""Conversations that are longer than the sequences of a job: counted for its notes, and listed as findings."""

from collections import Counter
from collections.abc import Iterator

from dataserver.dataset import CUT_CHAT, LONG_CHAT, Dataset, ShardFinding, printable
from dataserver.jobs.cache import JobCache
from dataserver.jobs.catalog import dataset_of
from dataserver.jobs.tables import ShardTables
from dataserver.planning.job.fields import Stream
from dataserver.planning.job.identity import hash_of
from dataserver.planning.stream.captions import Captions

_REMEDIES = {
    LONG_CHAT: "raise it, or cut them behind an answer that fits (conversations.cut_at: turn)",
    CUT_CHAT: "raise it to have them whole",
}


class LongChatCounts:
    """Counts those of one dataset of a job."""

    def __init__(self, tables: ShardTables, dataset: int) -> None:
        """Begin without any; `dataset` is a position in the job's list."""
        self._tables, self._dataset = tables, dataset
        self._counts = Counter[str]()
        self._first = dict[str, str]()

    def add(self, shard: int) -> None:
        """Count those of a shard."""
        found = self._tables.long_chats(self._dataset, shard)
        for kind, is_kind in ((LONG_CHAT, ~found.is_cut), (CUT_CHAT, found.is_cut)):
            self._counts[kind] += int(is_kind.sum())
            if is_kind.any() and kind not in self._first:
                key = self._tables.key(self._dataset, shard, int(found.row[is_kind][0]))
                self._first[kind] = f"{printable(key)} of {self._shard(shard)}"

    def notes(self, num_samples: int) -> list[str]:
        """What people should know, a line for each kind of finding.

        Args:
            num_samples: of the dataset.
        """
        spec, seq_len = self._tables.stream.datasets[self._dataset], self._tables.stream.seq_len
        return [
            f"dataset {spec.name!r}: {self._counts[kind]} of {num_samples} conversations are {what}, since they are "
            f"longer than seq_len {seq_len}, the first {first}; "
            f"{_remedy(kind, Captions.of(spec).cut_at_turn)}; dataserver lint --job lists them"
            for kind, what in ((LONG_CHAT, "left out"), (CUT_CHAT, "cut behind an answer"))
            if (first := self._first.get(kind))
        ]

    def _shard(self, shard: int) -> str:
        return self._tables.names(self._dataset)[shard]


def long_chat_findings(stream: Stream, dataset: Dataset) -> Iterator[ShardFinding]:
    """Yield a finding for each conversation of a dataset that is longer than a sequence.

    Args:
        stream: of a job, with this dataset alone.
        dataset: the open dataset.

    Raises:
        DatasetMismatchError: it is not the job's: it has another fingerprint or quarantine list.
        TokensMissingError: the dataset is not rendered by the job's template; names the command.
        FilterError: the filter does not fit the dataset's columns.
    """
    dataset = dataset_of(stream.datasets[0], dataset, stream.tokenizer.digest)
    tables = ShardTables(hash_of(stream), stream, [dataset], JobCache())
    cuts = Captions.of(stream.datasets[0]).cut_at_turn
    for number, shard in enumerate(dataset.shards):
        found = tables.long_chats(0, number)
        if not len(found.row):
            continue
        keys = shard.keys()
        for row, tokens, is_cut in zip(*(column.tolist() for column in found), strict=True):
            kind = CUT_CHAT if is_cut else LONG_CHAT
            what = "left out" if kind == LONG_CHAT else "cut behind the last answer that fits"
            detail = f"{tokens} tokens, seq_len is {stream.seq_len}: {what}; {_remedy(kind, cuts)}"
            yield ShardFinding(shard.name, keys[row], kind, detail)


def _remedy(kind: str, cuts: bool) -> str:
    return "no answer fits; raise it" if cuts and kind == LONG_CHAT else _REMEDIES[kind]
