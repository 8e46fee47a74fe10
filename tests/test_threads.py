"""Threads: bounded for small work, shared out among large pieces, and put back."""

import platform
import resource
import threading

import pytest
import torch

from otpdag.numerics import at_work, in_order


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_tasks_run_at_a_time_and_results_keep_their_order():
    both = threading.Barrier(2, timeout=30)  # broken, were there one thread only

    def task(number):
        both.wait()
        return number, torch.get_num_threads()

    with at_work(1):
        assert torch.get_num_threads() == 1
        found = list(in_order([lambda n=n: task(n) for n in range(6)]))
    assert found == [(number, 1) for number in range(6)]
    assert torch.get_num_threads() == 2


def test_without_bounds_one_task_follows_another_in_the_same_thread():
    assert set(in_order([threading.get_ident] * 3)) == {threading.get_ident()}


def test_few_tasks_are_taken_ahead():
    taken = []

    def tasks():
        for number in range(10):
            taken.append(number)
            yield lambda number=number: number

    with at_work(1):
        results = in_order(tasks())
        assert next(results) == 0
        assert len(taken) == 3
        assert list(results) == list(range(1, 10))


def test_an_error_comes_out_and_threads_are_put_back():
    def fails():
        raise ValueError("spoilt")

    with at_work(5_000_000):
        with pytest.raises(ValueError, match="spoilt"):
            list(in_order([lambda: 1, fails, lambda: 3]))
        assert torch.get_num_threads() == 2


def test_bounds_within_bounds_leave_what_was_allowed():
    with at_work(1), at_work(1):
        found = set(in_order([threading.get_ident] * 4))
    assert threading.get_ident() not in found


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library can be told")
def test_freed_memory_serves_the_next_tensors():
    def tensors():
        return [torch.ones(500_000, dtype=torch.float64) for _ in range(8)]

    with at_work(1):
        tensors()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            tensors()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pages = 8 * 500_000 * 8 / resource.getpagesize()
    assert faults < pages  # of twenty rounds: elsewhere each asks for all of them
