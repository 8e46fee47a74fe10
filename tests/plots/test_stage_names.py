"""Names of stages: none lies on another."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from otpdag.plots.curves import name_places


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.02, 0.4)), min_size=1, max_size=12))
def test_no_name_lies_on_another(stages: list[tuple[int, float]]) -> None:
    total = sum(length for length, _ in stages)
    ends = [sum(length for length, _ in stages[: number + 1]) / total for number in range(len(stages))]
    widths = [width for _, width in stages]
    spans = list(zip([0.0, *ends], ends, strict=False))
    places = name_places(spans, widths)
    for (one, first), (other, second) in combinations(zip(places, widths, strict=True), 2):
        apart = one.left + first <= other.left or other.left + second <= one.left
        assert apart or one.row != other.row
    assert all(-1e-12 <= place.left <= 1 - width + 1e-12 for place, width in zip(places, widths, strict=True))
