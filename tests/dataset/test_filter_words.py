"""What a user is told of a filter that the grammar does not have: their own text, and no word of Python's."""

import re

import pytest

from dataserver.dataset.errors import FilterError
from dataserver.dataset.filter_grammar import compile_filter

NO_VALUE = "which is neither the name of a column nor a value that a column can hold"
NO_PAIR = "which does not compare a column with a value"


@pytest.mark.parametrize(
    ("text", "part", "problem"),
    [
        ("x == None", "None", NO_VALUE),
        ("width > 3 and f(x) > 1", "f(x)", NO_VALUE),
        ("x + 1 > 2", "x + 1", NO_VALUE),
        ("x == 99999999999999999999", "99999999999999999999", NO_VALUE),
        ("x > -'a'", "-'a'", NO_VALUE),
        ("x in ()", "x in ()", "where `in` needs one or more values in parentheses"),
        ("x in (1, y)", "x in (1, y)", "where `in` needs one or more values in parentheses"),
        ("x in [1, 2]", "[1, 2]", NO_VALUE),
        ("1 in (1, 2)", "1 in (1, 2)", "which does not begin with the name of a column"),
        ("x is 3", "x is 3", "where `is` stands before something else than null or not null"),
        ("x == null", "null", "which no comparison holds for: write `is null` or `is not null`"),
        ("'a' < 'b' < 'c'", "'a' < 'b' < 'c'", NO_PAIR),
        ("x < y", "x < y", NO_PAIR),
        ("1 < 2", "1 < 2", NO_PAIR),
        ("x < 1 and y", "y", "which is no comparison"),
        ("lambda: 3", "lambda: 3", "which is no comparison"),
    ],
)
def test_what_a_filter_may_not_hold_is_named_in_the_users_words(text: str, part: str, problem: str) -> None:
    with pytest.raises(FilterError) as caught:
        compile_filter(text)
    place = text.index(part)
    assert str(caught.value).startswith(f"the filter holds {part!r} at byte {place}, {problem}; use comparisons of a")


@pytest.mark.parametrize("text", ["x == ...", "x := 3", "[x for x in y] > 1", "x > f'{y}'", "(yield x)", "x[0] > 1"])
def test_no_word_of_pythons_parser_is_shown(text: str) -> None:
    with pytest.raises(FilterError) as caught:
        compile_filter(text)
    assert not re.search(r"Constant|Expr|Comp|Call|Str\b|Subscript|Yield|<unknown>|line 1", str(caught.value))
