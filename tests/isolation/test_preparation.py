"""What a zygote does for each child before it forks."""

from __future__ import annotations

import random

import pytest

from toolcell_bridge.entry import preparation

pytestmark = pytest.mark.quick


def test_a_child_has_no_number_of_its_zygote() -> None:
    before = random.getstate()
    try:
        random.seed(7)
        random.gauss(0, 1)  # makes two numbers, and keeps the second
        kept = random.getstate()
        preparation.reseed()
        now = random.getstate()
        assert now[1] != kept[1]
        assert kept[2] is not None and now[2] is None
    finally:
        random.setstate(before)


def test_no_two_children_have_the_same_state_of_numpys_old_generator() -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_state()
    try:
        drawn = set[float]()
        for _ in range(3):
            numpy.random.seed(7)
            numpy.random.normal()  # makes two numbers, and keeps the second
            preparation.reseed()
            drawn.add(float(numpy.random.normal()))
        numpy.random.seed(7)
        drawn |= {float(numpy.random.normal()) for _ in range(2)}
    finally:
        numpy.random.set_state(before)

    assert len(drawn) == 5
