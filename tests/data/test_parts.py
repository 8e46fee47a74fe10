"""Parts of a table: work comes back in their order, and is done as often as it must be."""

import pytest

from otpdag.data.partitioned import LocalParts


def counted():
    """Three parts that note when they are made."""
    made = []

    def parts():
        for number in (1, 2, 3):
            made.append(number)
            yield number

    return made, LocalParts(parts)


def test_results_come_in_the_order_of_the_parts_with_their_numbers():
    _, parts = counted()
    assert list(parts.each(lambda part, number, more: (part, number, more), "x")) == [
        (1, 0, "x"),
        (2, 1, "x"),
        (3, 2, "x"),
    ]


@pytest.mark.parametrize(("keep", "passes"), [(True, 1), (False, 3)])
def test_kept_parts_are_made_once_and_others_in_every_pass(keep, passes):
    made, parts = counted()
    doubled = parts.mapped(lambda part, number: 2 * part, keep=keep)
    for _ in range(3):
        assert list(doubled.each(lambda part, number: part + 1)) == [3, 5, 7]
    assert made == [1, 2, 3] * passes


def test_work_follows_work():
    _, parts = counted()
    twice = parts.mapped(lambda part, number: part + number, keep=False).mapped(
        lambda part, number: 10 * part, keep=False
    )
    assert list(twice.each(lambda part, number: part)) == [10, 30, 50]
    assert parts.with_columns(["x"]) is parts
