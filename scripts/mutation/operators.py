"""What a mutant changes: Cosmic Ray's operators that are worth a run, and three more."""

from collections.abc import Iterable, Iterator
from typing import Any

from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword, Name

Position = tuple[tuple[int, int], tuple[int, int]]
"""First line and column, and those after the last character."""

_BINARY = "Add_Sub Sub_Add Mul_FloorDiv FloorDiv_Mul Div_Mul Mod_FloorDiv Pow_Mul RShift_LShift LShift_RShift"
_BITS = "BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"
_COMPARISONS = "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
_UNARY = "Delete_USub Delete_Not Delete_Invert"
_OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ExceptionReplacer NumberReplacer ZeroIterationForLoop"
)


class _Own(Operator):  # type: ignore[misc]
    """An operator with at most one mutation of a node."""

    @classmethod
    def examples(cls) -> Iterable[Any]:
        """None: the tests have them."""
        return ()


class DeleteStatement(_Own):
    """Replaces a call that stands alone, an augmented assignment, a raise or a del by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """A line with such a statement first."""
        if node.type == "simple_stmt" and _deletable(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        """Do nothing in its place."""
        first = node.children[0]
        node.children[0] = Keyword("pass", first.start_pos, first.get_first_leaf().prefix)
        return node


class InvertMembership(_Own):
    """Swaps `in` and `not in`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """One of the two in a comparison."""
        if node.parent is not None and node.parent.type == "comparison" and _words(node) in ("in", "not in"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        """Swap `in` and `not in`."""
        return Keyword("not in" if _words(node) == "in" else "in", node.start_pos, " ")


class SwapFunction(_Own):
    """Calls the opposite function: min and max, any and all, and numpy's."""

    pairs = (("min", "max"), ("minimum", "maximum"), ("any", "all"), ("argmin", "argmax"), ("floor", "ceil"))
    opposite = dict(pairs) | {b: a for a, b in pairs}

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """The name of one of these functions where it is called."""
        if node.type == "name" and node.value in self.opposite and node.get_next_leaf().value == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        """Name the opposite function."""
        return Name(self.opposite[node.value], node.start_pos, node.prefix)


def operators() -> list[Any]:
    """One of each operator, in a fixed order."""
    names = [f"ReplaceBinaryOperator_{name}" for name in (_BINARY + " " + _BITS).split()]
    names += [f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()]
    names += [f"ReplaceUnaryOperator_{name}" for name in _UNARY.split()]
    names += _OTHERS.split()
    return [*(get_operator(f"core/{name}")() for name in names), DeleteStatement(), InvertMembership(), SwapFunction()]


def _deletable(node: Any) -> bool:
    """Whether a statement is a call, `x += y`, `raise` or `del`."""
    if node.type == "expr_stmt":
        return node.children[1].type == "operator" and node.children[1].value not in ("=", ":")
    if node.type == "atom_expr":
        return bool(node.children[-1].get_first_leaf().value == "(")
    return node.type in ("raise_stmt", "del_stmt") or (node.type == "keyword" and node.value == "raise")


def _words(node: Any) -> str:
    return " ".join(node.get_code(include_prefix=False).split())
