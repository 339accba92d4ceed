"""Checks of exercise 4.15: one of the ranks is really killed in the middle of a save."""

from __future__ import annotations

from distlab.grading import exercise
from tests.phase4.kills import expect_kept_by_both, one_rank_killed


@exercise("4.15", "gloo", asserts="saved")
def test_one_of_two_ranks_is_killed(impl, run, seed, folder):
    """SIGKILL to one of two ranks in the middle of a save: the state is whole on both of them."""

    def body(ctx):
        return one_rank_killed(impl, folder / "store", seed)

    [notes] = run(body, 1, process_group=False, timeout=55)
    expect_kept_by_both(notes)
