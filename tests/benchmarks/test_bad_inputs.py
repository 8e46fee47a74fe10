"""Bad inputs of the command line: a sample of them, none of which may be called a bug of otpdag."""

import random

import pytest

from benchmarks.bad_inputs import BUG, answer, bad_inputs


@pytest.mark.filterwarnings("ignore")
def test_no_bad_input_is_called_a_bug(tmp_path):
    every = list(bad_inputs(seed=3))
    assert len(every) >= 400
    for bad in random.Random(0).sample(every, 60):
        code, message = answer(bad, tmp_path)
        assert code != BUG, f"{bad.name}: {message}"
        assert "Traceback" not in message
