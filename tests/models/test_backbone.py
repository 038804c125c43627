"""The backbone: packed sequences, pipeline stages, embeddings in, conditions and loss out."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainclient.models.backbone import BackboneBatch, BackboneStage, StageOutput, stage_layers, token_loss
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.parameters import initialise

CONFIG = BackboneConfig(
    layers=5, width=16, mlp_width=24, heads=4, groups=2, rotary_base=1e4, vocab_size=11, query_tokens=2
)
SEED = 3


def make_stages(num_stages: int, config: BackboneConfig = CONFIG, checkpoint: bool = False) -> list[BackboneStage]:
    stages = [BackboneStage(config, s, num_stages, checkpoint=checkpoint).double() for s in range(num_stages)]
    for stage in stages:
        initialise(stage, SEED, "backbone")
    return stages


def run(stages: list[BackboneStage], batch: BackboneBatch, embeddings: Tensor | None) -> StageOutput:
    output = stages[0](batch, embeddings=embeddings)
    for stage in stages[1:]:
        output = stage(batch, hidden=output.hidden)
    assert isinstance(output, StageOutput)
    return output


def make_batch(lengths: list[int], embedding_slots: list[int], condition_slots: list[int]) -> BackboneBatch:
    generator = torch.Generator().manual_seed(9)
    tokens = sum(lengths)
    labels = torch.randint(0, 11, (tokens,), dtype=torch.int32, generator=generator)
    labels[::3] = -100
    return BackboneBatch(
        cu_lengths=torch.tensor([0, *lengths]).cumsum(0).int(),
        position_ids=torch.tensor([p for n in lengths for p in range(n)], dtype=torch.int32),
        token_ids=torch.randint(0, 11, (tokens,), dtype=torch.int32, generator=generator),
        embedding_slots=torch.tensor(embedding_slots, dtype=torch.int32),
        condition_slots=torch.tensor(condition_slots, dtype=torch.int32),
        labels=labels,
    )


def make_embeddings(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, 16, dtype=torch.float64, generator=generator).requires_grad_()


FULL = make_batch([6, 1, 9], embedding_slots=[1, 2, 8, 9], condition_slots=[4, 5, 13, 14])


def loss_of(output: StageOutput) -> Tensor:
    """A loss to which both outputs contribute."""
    assert output.loss_sum is not None
    assert output.conditions is not None
    return output.loss_sum + output.conditions.square().sum()


def test_packed_sequences_equal_each_alone() -> None:
    stages, embeddings = make_stages(1), make_embeddings(4)
    packed = run(stages, FULL, embeddings)
    first = BackboneBatch(
        torch.tensor([0, 6]),
        FULL.position_ids[:6],
        FULL.token_ids[:6],
        torch.tensor([1, 2]),
        torch.tensor([4, 5]),
        FULL.labels[:6],
    )
    second = BackboneBatch(
        torch.tensor([0, 1]),
        FULL.position_ids[6:7],
        FULL.token_ids[6:7],
        torch.tensor([]).int(),
        torch.tensor([]).int(),
        FULL.labels[6:7],
    )
    third = BackboneBatch(
        torch.tensor([0, 9]),
        FULL.position_ids[7:],
        FULL.token_ids[7:],
        torch.tensor([1, 2]),
        torch.tensor([6, 7]),
        FULL.labels[7:],
    )
    outputs = [
        run(stages, batch, part) for batch, part in ((first, embeddings[:2]), (second, None), (third, embeddings[2:]))
    ]
    torch.testing.assert_close(packed.conditions, torch.cat([o.conditions for o in outputs]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed.loss_sum, torch.stack([o.loss_sum for o in outputs]).sum(), rtol=1e-12, atol=0)


def test_one_segment_of_packed_input_does_not_see_another() -> None:
    stages = make_stages(1)
    changed = FULL.token_ids.clone()
    changed[0] = (changed[0] + 1) % 11
    before = run(stages, FULL, make_embeddings(4)).conditions
    after = run(stages, replace(FULL, token_ids=changed), make_embeddings(4)).conditions
    assert not torch.allclose(before[:2], after[:2])
    assert torch.equal(before[2:], after[2:])


def test_attention_is_causal() -> None:
    stages = make_stages(1)
    changed = FULL.token_ids.clone()
    changed[15] = (changed[15] + 1) % 11
    before = run(stages, FULL, make_embeddings(4)).conditions
    assert torch.equal(before, run(stages, replace(FULL, token_ids=changed), make_embeddings(4)).conditions)


def test_only_distances_between_positions_matter() -> None:
    stages = make_stages(1)
    before = run(stages, FULL, make_embeddings(4)).conditions
    shifted = replace(FULL, position_ids=FULL.position_ids + 1000)
    torch.testing.assert_close(run(stages, shifted, make_embeddings(4)).conditions, before, rtol=1e-9, atol=1e-11)
    stretched = replace(FULL, position_ids=FULL.position_ids * 2)
    assert not torch.allclose(run(stages, stretched, make_embeddings(4)).conditions, before)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_equal_the_whole(num_stages: int) -> None:
    whole, split = make_stages(1), make_stages(num_stages)
    inputs = [make_embeddings(4), make_embeddings(4)]
    losses = [loss_of(run(stages, FULL, rows)) for stages, rows in zip((whole, split), inputs, strict=True)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    parameters = dict(whole[0].named_parameters())
    names = [name for stage in split for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(parameters)
    for stage in split:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, parameters[name]), name
            torch.testing.assert_close(parameter.grad, parameters[name].grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=1e-15)


def test_every_layer_is_in_one_stage() -> None:
    for num_stages in range(1, 8):
        layers = [layer for stage in range(num_stages) for layer in stage_layers(7, stage, num_stages)]
        assert layers == list(range(7))
    with pytest.raises(ValueError, match="lower pp to at most 7"):
        stage_layers(7, 0, 8)
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\)"):
        stage_layers(7, 2, 2)


def test_gradients_match_finite_differences() -> None:
    stages = make_stages(1, replace(CONFIG, layers=1))
    batch = make_batch([5, 4], [1, 2], [7, 8])
    assert torch.autograd.gradcheck(lambda e: loss_of(run(stages, batch, e)), [make_embeddings(2)])


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpoint in (False, True):
        stages, embeddings = make_stages(2, checkpoint=checkpoint), make_embeddings(4)
        loss_of(run(stages, FULL, embeddings)).backward()
        gradients.append([embeddings.grad, *[p.grad for stage in stages for p in stage.parameters()]])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_loss_is_the_sum_over_labelled_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(7, 6, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(0, 7, (10,), generator=generator)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected, [hidden, weight])
    for max_logits in (1, 7 * 3, 7 * 10):
        loss = token_loss(hidden, targets, weight, max_logits)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.autograd.grad(loss, [hidden, weight]), wanted, rtol=1e-12, atol=1e-14)


def test_ignored_labels_add_nothing() -> None:
    stages = make_stages(1)
    only_one = torch.full_like(FULL.labels, -100)
    only_one[4] = FULL.labels[4]
    rest = FULL.labels.clone()
    rest[4] = -100
    losses = [run(stages, replace(FULL, labels=x), make_embeddings(4)).loss_sum for x in (only_one, rest, FULL.labels)]
    torch.testing.assert_close(losses[0] + losses[1], losses[2], rtol=1e-12, atol=0)
    nothing = run(stages, replace(FULL, labels=torch.full_like(rest, -100)), make_embeddings(4)).loss_sum
    assert nothing.item() == 0


@pytest.mark.parametrize("lengths", [[], [0], [4, 3]])
def test_empty_inputs_still_give_every_parameter_a_gradient(lengths: list[int]) -> None:
    batch = make_batch(lengths, [], [])
    batch = replace(batch, labels=torch.full_like(batch.labels, -100))
    stages = make_stages(2)
    output = run(stages, batch, None)
    loss_of(output).backward()
    assert output.conditions.shape == (0, 16)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_a_backbone_without_queries() -> None:
    stages = make_stages(1, replace(CONFIG, query_tokens=0))
    batch = replace(FULL, condition_slots=torch.zeros(0, dtype=torch.int32))
    assert "query.weight" not in stages[0].state_dict()
    assert run(stages, batch, make_embeddings(4)).conditions.shape == (0, 16)
    with pytest.raises(ValueError, match="0 query tokens"):
        run(stages, FULL, make_embeddings(4))


def test_loss_is_float32_where_the_model_is_half() -> None:
    stage = make_stages(1)[0].bfloat16()
    output = run([stage], FULL, make_embeddings(4))
    assert output.loss_sum.dtype == torch.float32
    assert output.conditions.dtype == torch.bfloat16


def test_training_on_one_batch_lowers_the_loss() -> None:
    stages, embeddings = make_stages(2), make_embeddings(4)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = run(stages, FULL, embeddings).loss_sum
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": FULL.token_ids + 11}, r"token_ids holds values from .* in \[0, 11\)"),
        ({"token_ids": None}, "request them in the view"),
        ({"labels": None}, "last stage needs labels"),
        ({"labels": FULL.labels * 0 - 1}, "labels holds values"),
        ({"labels": FULL.labels[1:]}, "labels has shape"),
        ({"embedding_slots": torch.tensor([0, 1, 2, 16])}, "embedding_slots holds values from 0 to 16"),
        ({"embedding_slots": torch.tensor([0, 1])}, "embeddings has shape"),
        ({"condition_slots": torch.tensor([0, 1, 2])}, "3 entries; the backbone has 2 query tokens"),
        ({"condition_slots": torch.tensor([-1, 0])}, "condition_slots holds values from -1"),
        ({"cu_lengths": torch.tensor([0, 15])}, "number of rows, 16"),
        ({"position_ids": FULL.position_ids[1:]}, "position_ids has shape"),
    ],
)
def test_views_that_contradict_themselves_are_refused(change: dict[str, Tensor | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_stages(1), replace(FULL, **change), make_embeddings(4))


def test_hidden_states_go_to_all_stages_but_the_first() -> None:
    stages = make_stages(2)
    with pytest.raises(ValueError, match="first stage takes no hidden"):
        stages[1](FULL)
    with pytest.raises(ValueError, match="first stage takes no hidden"):
        stages[0](FULL, hidden=torch.zeros(16, 16, dtype=torch.float64))
