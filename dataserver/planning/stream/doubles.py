"""Arithmetic of doubles (IEEE 754, rounded to the nearest, ties to even) in exact fractions.

Image processors compute sizes in doubles and round them down or up. Where the exact result is whole, what they find
depends on how their doubles were rounded. No float takes part in a decision here, so these few cases are computed in
fractions, with a rounding to 53 bits after each operation.
"""

from fractions import Fraction
from math import isqrt
from typing import Final

_BITS: Final = 53


def as_double(value: Fraction) -> Fraction:
    """The double that is nearest to a positive number."""
    bits = value.numerator.bit_length() - value.denominator.bit_length()
    shift = _BITS - bits
    if value * Fraction(2) ** shift >= 2**_BITS:
        shift -= 1
    return Fraction(round(value * Fraction(2) ** shift), Fraction(2) ** shift)


def root_as_double(value: Fraction) -> Fraction:
    """The double that is nearest to the square root of a positive double."""
    places = 2 * _BITS + value.denominator.bit_length()
    scaled = value * 4**places
    whole = scaled.numerator // scaled.denominator
    root = isqrt(whole)
    # What lies between two integers is told apart from both by another half.
    return as_double(Fraction(2 * root + (root**2 != scaled), 2 ** (places + 1)))
