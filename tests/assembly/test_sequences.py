"""Backbone sequences against a naive reference, one token at a time."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.assembly.sequences import TokenCountError, TokenizedDocument, backbone_arrays
from dataserver.assembly.tensors import view_tensors
from dataserver.assembly.tokens import ByteTokenizer, tokenizer_spec
from dataserver.planning.job.fields import TokenizerSpec
from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import ViewPlan, view_plan
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples, Task

JOB = parse_job(
    {
        "stream": {
            "datasets": [{"name": "pairs", "fingerprint": "0" * 64}],
            "tokenizer": tokenizer_spec(ByteTokenizer()).model_dump(),
            "sizing": {"patch": 4, "merge": 2, "max_patches": 64},
            "seq_len": 256,
            "global_batch": 8,
            "generation": {"ratio": "0.5", "query_tokens": 3},
        },
        "execution": {
            "modules": [
                {"name": "vit", "kind": "encoder"},
                {"name": "llm", "kind": "backbone", "dp": 2},
                {"name": "dit", "kind": "generator"},
            ],
            "microbatch": 2,
            "end": {"steps": 1},
        },
    }
)


@dataclass
class Document:
    """One sample before planning: parts are lists of tokens, or (rows, columns)."""

    parts: list[list[int] | tuple[int, int]]
    task: Task
    cut: int

    @property
    def texts(self) -> list[list[int]]:
        return [p for p in self.parts if isinstance(p, list)]

    @property
    def grids(self) -> list[tuple[int, int]]:
        return [p for p in self.parts if isinstance(p, tuple)]

    @property
    def text_tokens(self) -> int:
        return max(0, sum(map(len, self.texts)) - self.cut)

    def tokenized(self) -> TokenizedDocument:
        kinds = tuple(0 if isinstance(p, list) else 1 for p in self.parts)
        return TokenizedDocument(kinds, tuple(np.array(t, np.int32) for t in self.texts))


def naive(document: Document, ids: TokenizerSpec) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens, labels, image positions and query positions of one sample, token by token."""
    left = document.text_tokens
    tokens, is_target, images, queries = [ids.bos], [False], [], []
    understood = document.task is Task.UNDERSTANDING
    for part in document.parts:
        if isinstance(part, list):
            for token in part:
                if left > 0:
                    left -= 1
                    tokens.append(token)
                    is_target.append(understood)
        elif understood:
            tokens.append(ids.boi)
            for _ in range(part[0] * part[1] // 4):
                images.append(len(tokens))
                tokens.append(ids.image)
            tokens.append(ids.eoi)
            is_target += [False] * (len(tokens) - len(is_target))
    if understood:
        tokens.append(ids.eos)
        is_target.append(True)
    else:
        tokens.append(ids.boi)
        for _ in range(3):
            queries.append(len(tokens))
            tokens.append(ids.query)
        is_target += [False] * 4
    labels = [tokens[t + 1] if t + 1 < len(tokens) and is_target[t + 1] else -100 for t in range(len(tokens))]
    return tokens, labels, images, queries


def step_samples(documents: list[Document]) -> StepSamples:
    lengths = [len(naive(d, JOB.stream.tokenizer)[0]) for d in documents]
    grids = [g for d in documents for g in d.grids]
    n = len(documents)
    text_tokens = np.array([d.text_tokens for d in documents], np.int64)
    return StepSamples(
        dataset=np.zeros(n, np.int32),
        epoch=np.zeros(n, np.int64),
        sample=np.arange(n, dtype=np.uint64),
        task=np.array([d.task for d in documents], np.int32),
        text_tokens=text_tokens,
        truncated_tokens=np.array([sum(map(len, d.texts)) for d in documents], np.int64) - text_tokens,
        tokens=np.array(lengths, np.int64),
        image_offsets=np.concatenate([[0], np.cumsum([len(d.grids) for d in documents])]).astype(np.int64),
        image_rows=np.array([g[0] for g in grids], np.int32),
        image_columns=np.array([g[1] for g in grids], np.int32),
    )


# text may hold any id, also those of special tokens
TEXT = st.lists(st.integers(0, 262), max_size=8)
GRID = st.tuples(st.sampled_from([2, 4]), st.sampled_from([2, 4, 6]))
UNDERSTOOD = st.builds(
    Document, st.lists(TEXT | GRID, min_size=1, max_size=5), st.just(Task.UNDERSTANDING), st.integers(0, 12)
)
GENERATED = st.builds(
    lambda grid, text, cut: Document([grid, text], Task.GENERATION, cut), GRID, TEXT, st.integers(0, 12)
)


@given(st.lists(UNDERSTOOD | GENERATED, min_size=1, max_size=12))
@settings(max_examples=150)
def test_every_view_of_a_step_is_the_naive_one(documents: list[Document]) -> None:
    plan = plan_step(JOB, 0, step_samples(documents))
    seen: list[int] = []
    for rank in range(2):
        for microbatch in range(plan.num_microbatches):
            view = view_plan(JOB.spec, plan, "llm", rank, microbatch)
            mine = [documents[i] for i in view.items]
            arrays = backbone_arrays(JOB.stream, plan, view, [d.tokenized() for d in mine])
            check_view(arrays, mine, view.slots.tolist(), plan.sequences_per_microbatch)
            layout = {t.name: t.shape for t in view_tensors(JOB.spec, plan, view)}
            assert {name: array.shape for name, array in arrays.items()} == layout
            assert all(array.dtype == np.int32 for array in arrays.values())
            seen += view.items.tolist()
    assert sorted(seen) == list(range(len(documents)))


def check_view(arrays: dict[str, np.ndarray], documents: list[Document], slots: list[int], num_slots: int) -> None:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    images: list[int] = []
    queries: list[int] = []
    ends = [0]
    slot_ends = [0] * (num_slots + 1)
    for document, slot in zip(documents, slots, strict=True):
        sample_tokens, sample_labels, sample_images, sample_queries = naive(document, JOB.stream.tokenizer)
        images += [len(tokens) + i for i in sample_images]
        queries += [len(tokens) + i for i in sample_queries]
        tokens += sample_tokens
        labels += sample_labels
        positions += range(len(sample_tokens))
        ends.append(len(tokens))
        for later in range(slot + 1, num_slots + 1):
            slot_ends[later] = len(tokens)
    expected = {
        "token_ids": tokens,
        "labels": labels,
        "position_ids": positions,
        "cu_lengths": ends,
        "cu_sequences": slot_ends,
        "embedding_slots": images,
        "condition_slots": queries,
    }
    assert {name: array.tolist() for name, array in arrays.items()} == expected


def test_the_targets_of_all_views_are_the_planned_denominator() -> None:
    documents = [
        Document([(2, 2), [5, 6, 7]], Task.UNDERSTANDING, 0),
        Document([(2, 4), [8, 9]], Task.GENERATION, 0),
        Document([[1, 2], (2, 2), [3, 4, 5]], Task.UNDERSTANDING, 2),
        Document([(4, 4)], Task.UNDERSTANDING, 0),
    ]
    plan = plan_step(JOB, 0, step_samples(documents))
    targets = 0
    for rank in range(2):
        for microbatch in range(plan.num_microbatches):
            view = view_plan(JOB.spec, plan, "llm", rank, microbatch)
            arrays = backbone_arrays(JOB.stream, plan, view, [documents[i].tokenized() for i in view.items])
            targets += int((arrays["labels"] != -100).sum())
    # three texts of 3, 0 (generated) and 3 tokens that are left, and the EOS of three understood samples
    assert targets == plan.text_tokens == 3 + 3 + 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (TokenizedDocument((1, 0), (np.arange(4, dtype=np.int32),)), "makes 4 tokens of its texts, the plan counts 3"),
        (TokenizedDocument((0,), (np.arange(3, dtype=np.int32),)), "1 images in the plan"),
        (TokenizedDocument((1, 0, 0), (np.arange(3, dtype=np.int32),)), "1 texts"),
    ],
)
def test_a_document_that_was_not_planned_is_refused(changed: TokenizedDocument, message: str) -> None:
    plan = plan_step(JOB, 0, step_samples([Document([(2, 2), [5, 6, 7]], Task.UNDERSTANDING, 1)]))
    views = [view_plan(JOB.spec, plan, "llm", rank, m) for rank in range(2) for m in range(plan.num_microbatches)]
    (view,) = [view for view in views if view.num_items]
    with pytest.raises(TokenCountError, match=message) as caught:
        backbone_arrays(JOB.stream, plan, view, [changed])
    assert "dataset pairs, shard 0, row 0" in str(caught.value)


def one_view() -> tuple[StepPlan, ViewPlan, TokenizedDocument]:
    """The view of an image and a text of three tokens; two of them fit."""
    document = Document([(2, 2), [5, 6, 7]], Task.UNDERSTANDING, 1)
    plan = plan_step(JOB, 0, step_samples([document]))
    views = [view_plan(JOB.spec, plan, "llm", rank, m) for rank in range(2) for m in range(plan.num_microbatches)]
    (view,) = [view for view in views if view.num_items]
    return plan, view, document.tokenized()


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plan, view, document = one_view()
    for tokens in (plan.samples.tokens - 1, plan.samples.tokens + 1):
        with pytest.raises(TokenCountError) as caught:
            backbone_arrays(JOB.stream, replace(plan, samples=replace(plan.samples, tokens=tokens)), view, [document])
        length = int(plan.samples.tokens[0])
        assert f"its sequence has {length} tokens, the plan counts {int(tokens[0])}; the plan" in str(caught.value)
    with pytest.raises(ValueError, match=r"samples begin at tokens \[1\] in the plan, at \[0\] in the view; the plan"):
        backbone_arrays(JOB.stream, plan, replace(view, starts=view.starts + 1), [document])
