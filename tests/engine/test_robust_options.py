"""Limits of what a fit may leave out."""

import pytest

import otpdag as otp
from otpdag.errors import ModelError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most_dropped": 0.0}, "most_dropped must be a share between 0 and 1; got 0.0"),
        ({"most_dropped": 1.0}, "most_dropped must be a share between 0 and 1; got 1.0"),
        ({"most_dropped": float("nan")}, "most_dropped must be a share between 0 and 1; got nan"),
        ({"slack": 0.9}, "slack must be at least 1, the model's own mass; got 0.9"),
        ({"tails": ()}, r"tails must be probabilities that fall; got \(\)"),
        ({"tails": (0.1, 0.2)}, r"tails must be probabilities that fall; got \(0.1, 0.2\)"),
        ({"tails": (0.1, 0.1)}, "tails must be probabilities that fall"),
        ({"tails": (1.5,)}, "tails must be probabilities that fall"),
        ({"tails": (0.1, 0.0)}, "tails must be probabilities that fall"),
        ({"cap": 0.0}, "cap must be a probability between 0 and 1; got 0.0"),
    ],
)
def test_limits_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        otp.RobustOptions(**options)


def test_one_tail_and_no_slack_are_enough():
    options = otp.RobustOptions(tails=(0.01,), slack=1.0)
    assert (options.tails, options.slack, options.most_dropped) == ((0.01,), 1.0, 0.25)
