from random import Random

from fuzz.mutation import MAX_BYTES, Fuzzing, mutated


def test_a_seed_gives_the_same_inputs_and_none_grows_without_bound() -> None:
    others = [b"one", bytes(range(256)) * 100]

    def inputs(seed: int) -> list[bytes]:
        numbers = (Random(f"{seed}:{i}") for i in range(2000))
        return [mutated(n.choice(others), others, n) for n in numbers]

    assert inputs(1) == inputs(1) != inputs(2)
    assert max(map(len, inputs(1))) <= MAX_BYTES


def test_the_time_ends_and_the_numbers_are_those_of_the_seed() -> None:
    first = next(Fuzzing(60, 5).numbers())
    assert first.random() == Random("5:0").random()
    assert list(Fuzzing(0, 5).numbers()) == []
