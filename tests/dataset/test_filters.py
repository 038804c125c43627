"""Filters: against a reference in plain Python, and against everything that the grammar does not have."""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.dataset.errors import FilterError
from dataserver.dataset.filter_grammar import MAX_FILTER_CHARS, MAX_FILTER_DEPTH, compile_filter
from dataserver.dataset.filters import Comparison, Group


class Columns:
    """A shard that only has columns."""

    def __init__(self, known: frozenset[str] = frozenset(), **columns: Any) -> None:
        self._columns = {name: pa.array(*values) for name, values in columns.items()}
        self.name = "00000.tar"
        self.known_columns = known | frozenset(columns)
        self.num_samples = len(next(iter(self._columns.values())))

    @property
    def columns(self) -> Mapping[str, str]:
        return {name: str(values.type) for name, values in self._columns.items()}

    def column(self, name: str) -> pa.Array:
        return self._columns[name]


SHARD = Columns(
    known=frozenset({"elsewhere"}),
    width=([100, 256, 512, None], pa.int64()),
    punsafe=([0.05, 0.5, None, 0.1], pa.float64()),
    nsfw=(["UNLIKELY", None, "NSFW", "a b"], pa.string()),
    ok=([True, False, None, True], pa.bool_()),
    **{"clip-b32 score": ([0.25, 0.35, None, 0.3], pa.float64()), "gr\u00f6\u00dfe": ([1, 2, 3, 4], pa.int64())},
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("width >= 256", [0, 1, 1, 0]),
        ("256 <= width", [0, 1, 1, 0]),
        ("width >= 256 and punsafe < 0.6", [0, 1, 0, 0]),
        ("100 < width <= 512", [0, 1, 1, 0]),
        ("not width >= 256", [1, 0, 0, 1]),
        ("width == 100 or punsafe == 0.1", [1, 0, 0, 1]),
        ("width > 100.5", [0, 1, 1, 0]),
        ("punsafe < 1", [1, 1, 0, 1]),
        ("punsafe > -1", [1, 1, 0, 1]),
        ("width != -3", [1, 1, 1, 0]),
        ("nsfw != 'NSFW'", [1, 0, 0, 1]),
        ('nsfw == "a b"', [0, 0, 0, 1]),
        ("nsfw < 'V'", [1, 0, 1, 0]),
        ("ok == true", [1, 0, 0, 1]),
        ("ok != True", [0, 1, 0, 0]),
        ("(ok == false or (width == 512)) and not (punsafe > 1.0)", [0, 1, 1, 0]),
        ("elsewhere > 3", [0, 0, 0, 0]),
        ("width < 9223372036854775807", [1, 1, 1, 0]),
        ("width < 1e999", [1, 1, 1, 0]),
        ("width in (100, 512)", [1, 0, 1, 0]),
        ("width in (100)", [1, 0, 0, 0]),
        ("width in (100, -3, 256.0)", [1, 1, 0, 0]),
        ("width not in (100, 7)", [0, 1, 1, 0]),
        ("not width in (100, 7)", [0, 1, 1, 1]),
        ("punsafe in (0.1, 1)", [0, 0, 0, 1]),
        ("nsfw in ('NSFW', 'a b',)", [0, 0, 1, 1]),
        ("ok in (true, false)", [1, 1, 0, 1]),
        ("elsewhere in (3, 4)", [0, 0, 0, 0]),
        ("elsewhere not in (3, 4)", [0, 0, 0, 0]),
        ("width is null", [0, 0, 0, 1]),
        ("width is not null and nsfw is not null", [1, 0, 1, 0]),
        ("elsewhere is null", [1, 1, 1, 1]),
        ("not elsewhere is not null", [1, 1, 1, 1]),
        ("punsafe is null or punsafe < 0.1", [1, 0, 1, 0]),
        ('"clip-b32 score" > 0.28', [0, 1, 0, 1]),
        ("0.28 < 'clip-b32 score' <= 0.3", [0, 0, 0, 1]),
        ('"clip-b32 score" is null', [0, 0, 1, 0]),
        ('"clip-b32 score" in (0.25, 0.3)', [1, 0, 0, 1]),
        ('"nsfw" == "NSFW"', [0, 0, 1, 0]),
        ('"NSFW" == nsfw', [0, 0, 1, 0]),
        ('"ok" == true', [1, 0, 0, 1]),
        ('"gr\u00f6\u00dfe" >= 3', [0, 0, 1, 1]),
    ],
)
def test_masks(text: str, expected: list[int]) -> None:
    mask = compile_filter(text).mask(SHARD)
    assert mask.dtype == np.bool_
    assert mask.tolist() == [bool(bit) for bit in expected]


@pytest.mark.parametrize(
    "text",
    [
        "", "width", "ok", "true", "1 < 2", "width < punsafe", "width + 1 < 2", "f(width) < 1", "width.real < 1",
        "width < (1 if ok else 2)", "__import__('os').system('true') == 0", "width in ()", "width in width",
        "width is 1",
        "width == null", "null is null", "width is not 1", "1 in (1, 2)", "width in [1]", "'a' < 'b' < 'c'",
        "width < None", "width < 1j", "width == b'x'", "width[0] < 1", "[w for w in 'a'] == 1", "lambda: 1",
        "(x := 3) > 2", "width < 1; 2", "width <", "width < +1", "width < --1", "width = 1", "a < b < 3", "w\0 < 1",
        "width < 9223372036854775808", "nsfw == '\\ud800'", "width < " + "9" * 4500, "width < 1\nwidth > 2",
        "not " * 100 + "width < 1", "not " * 1000 + "width < 1", "(" * 1000 + "width < 1" + ")" * 1000,
        "-" * 2000 + "1 < width", "width" + ".a" * 1900 + " < 1",
        "width < 1" + " " * MAX_FILTER_CHARS, "f'{width}' == 'a'", "width < ...",
    ],
)  # fmt: skip
def test_what_the_grammar_does_not_have(text: str) -> None:
    with pytest.raises(FilterError, match="filter"):
        compile_filter(text)


@pytest.mark.parametrize(
    ("text", "name", "position"),
    [
        ("wi\u217eth > 1", "wi\\\\u217eth", 0),
        ("width > 1 and \u217e < 3", "\\\\u217e", 14),
        ("flag == \uff54rue", "\\\\uff54rue", 8),
        ("gr\u00f6\u00dfe > 1", "gr\\\\xf6\\\\xdfe", 0),
    ],
)
def test_names_that_look_like_columns_are_refused_by_name_and_place(text: str, name: str, position: int) -> None:
    with pytest.raises(FilterError, match=f"'{name}' at byte {position}, which is not ASCII"):
        compile_filter(text)
    assert compile_filter("tag == 'gr\u00f6\u00dfe \u217e'")


@pytest.mark.parametrize(
    "text",
    [
        "widht > 1",
        "width == 'a'",
        "nsfw < 3",
        "ok == 1",
        "width == true",
        "ok < true",
        "punsafe == 'x'",
        "'nowhere' is null",
        "'nowhere' == 'a'",
        "width in (1, 'a')",
        "ok in (1, 2)",
    ],
)
def test_errors_list_the_columns(text: str) -> None:
    with pytest.raises(FilterError, match=r"nsfw.*ok.*punsafe.*width"):
        compile_filter(text).mask(SHARD)


def test_many_values_read_a_column_once_and_a_null_that_is_asked_for_drops_nothing() -> None:
    reads = []

    class Counted(Columns):
        def column(self, name: str) -> pa.Array:
            reads.append(name)
            return super().column(name)

    shard = Counted(n=([1, 700, None], pa.int64()), m=([None, 1, 1], pa.int64()))
    assert compile_filter(f"n in ({', '.join(map(str, range(500, 900)))})").mask(shard).tolist() == [False, True, False]
    assert reads == ["n"]
    assert compile_filter("n is null and m > 0").nulls(shard).tolist() == [True, False, False]
    assert compile_filter("n is not null").nulls(shard).tolist() == [False, False, True]


COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
ints = st.integers(-5, 5)
comparisons = st.tuples(st.sampled_from("ab"), st.sampled_from(sorted(COMPARISONS)), ints, st.booleans())
trees = st.recursive(
    comparisons,
    lambda t: st.tuples(st.just("not"), t) | st.tuples(st.sampled_from(["and", "or"]), t, t),
    max_leaves=8,
)


def render(tree: Any) -> str:
    if tree[0] == "not":
        return f"not ({render(tree[1])})"
    if tree[0] in {"and", "or"}:
        return f"({render(tree[1])}) {tree[0]} ({render(tree[2])})"
    column, symbol, literal, mirrored = tree
    return f"{literal} {symbol} {column}" if mirrored else f"{column} {symbol} {literal}"


def evaluate(tree: Any, row: dict[str, int | None]) -> bool:
    if tree[0] == "not":
        return not evaluate(tree[1], row)
    if tree[0] in {"and", "or"}:
        left, right = evaluate(tree[1], row), evaluate(tree[2], row)
        return left and right if tree[0] == "and" else left or right
    column, symbol, literal, mirrored = tree
    value = row[column]
    if value is None:
        return False
    return COMPARISONS[symbol](literal, value) if mirrored else COMPARISONS[symbol](value, literal)


@settings(max_examples=100, deadline=None)
@given(trees, st.lists(st.tuples(st.none() | ints, st.none() | ints), min_size=1, max_size=12))
def test_agrees_with_plain_python(tree: Any, rows: list[tuple[int | None, int | None]]) -> None:
    shard = Columns(a=([a for a, _ in rows], pa.int64()), b=([b for _, b in rows], pa.float64()))
    expected = [evaluate(tree, {"a": a, "b": b}) for a, b in rows]
    assert compile_filter(render(tree)).mask(shard).tolist() == expected


def nested(depth: int) -> str:
    return "not " * depth + "width < 1"


def test_what_compiles_to_what_and_each_limit_on_both_sides() -> None:
    lowest, highest = -(1 << 63), (1 << 63) - 1
    less = Comparison("width", "less", 1)
    trees = {
        "width < 1": less,
        "1 > width": less,
        "1 >= width": Comparison("width", "less_equal", 1),
        "1 < width": Comparison("width", "greater", 1),
        "1 <= width": Comparison("width", "greater_equal", 1),
        "1 == width": Comparison("width", "equal", 1),
        "1 != width": Comparison("width", "not_equal", 1),
        " width < 1 or ok\n== true ": "the filter",
        "(width < 1)": less,
        "1 > width < 1": Group("and", (less, less)),
        "width < 1 and width < 1 and width < 1": Group("and", (less, less, less)),
        "width < 1 or width < 1": Group("or", (less, less)),
        "not width < 1": Group("not", (less,)),
        f"width < {lowest}": Comparison("width", "less", lowest),
        f"width < {highest}": Comparison("width", "less", highest),
        "width < -1.5": Comparison("width", "less", -1.5),
        "ok == False": Comparison("ok", "equal", False),
        "ok == false": Comparison("ok", "equal", False),
        "nsfw == '\ud7ff\ue000'": Comparison("nsfw", "equal", "\ud7ff\ue000"),
    }
    for text, node in trees.items():
        if isinstance(node, str):
            with pytest.raises(FilterError, match=node):
                compile_filter(text)
        else:
            found = compile_filter(text)
            assert (found.text, found.node) == (text, node)
            literals = [c.literal for c in (found.node, node) if isinstance(c, Comparison)]
            assert len({type(literal) for literal in literals}) <= 1
    for refused in (lowest - 1, highest + 1, "-true", "-'a'", "'\\ud800'", "'a\\udfff'"):
        with pytest.raises(FilterError, match=r"which is neither the name of a column nor a value that a column can"):
            compile_filter(f"width < {refused}")
    assert compile_filter(nested(32)).mask(SHARD).tolist() == [False] * 4
    with pytest.raises(FilterError, match="the filter is nested deeper than 32; flatten it"):
        compile_filter(nested(33))
    with pytest.raises(FilterError, match="nested deeper than 32"):
        compile_filter("not " * 31 + "(width < 1 and (width < 1 or width < 1))")
    assert compile_filter("width < 1".ljust(4096)).node == less
    with pytest.raises(FilterError, match="the filter has 4097 characters, the limit is 4096; shorten it"):
        compile_filter("width < 1".ljust(4097))
    assert (MAX_FILTER_CHARS, MAX_FILTER_DEPTH) == (4096, 32)


def test_the_words_of_each_error() -> None:
    columns = (
        "clip-b32 score (double), gr\u00f6\u00dfe (int64), nsfw (string), ok (bool), punsafe (double), width (int64)"
    )
    for text, kind, done in (
        ("width == 'a'", "int64", "(equal) the column 'width' of type int64 in shard 00000.tar with 'a'"),
        ("ok < true", "bool", "(less) the column 'ok' of type bool in shard 00000.tar with True"),
        ("nsfw == 1", "string", "(equal) the column 'nsfw' of type string in shard 00000.tar with 1"),
    ):
        with pytest.raises(FilterError) as caught:
            compile_filter(f"width > 1 or {text}").check([SHARD])
        assert str(caught.value) == (
            f"the filter compares {done}; use a literal of its type; the columns are: {columns}"
        ), kind
    with pytest.raises(FilterError) as caught:
        compile_filter("no > 1").mask(SHARD)
    assert str(caught.value) == (
        "the filter names the column 'no', which no shard has; the columns are: clip-b32 score, elsewhere,"
        " gr\u00f6\u00dfe, nsfw, ok, punsafe, width"
    )
    with pytest.raises(FilterError) as caught:
        compile_filter("width > " + "1" * 60 + " " * 20 + " < < 3")
    assert str(caught.value).startswith(
        f"the filter {'width > ' + '1' * 60 + ' ' * 12!r} cannot be parsed (invalid syntax); use"
    )
    with pytest.raises(FilterError) as caught:
        compile_filter("width > 1 and [" + "1, " * 40 + "] < width")
    assert str(caught.value).startswith(f"the filter holds {('[' + '1, ' * 40)[:80]!r} at byte 14, which is neither")
    assert compile_filter("width >= 9007199254740993").mask(Columns(width=([1 << 53], pa.int64()))).tolist() == [False]
    assert compile_filter("width < 9007199254740993.0").mask(Columns(width=([(1 << 53) + 1], pa.int64()))).tolist() == [
        False
    ]
