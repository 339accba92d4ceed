"""Naive: values on two ranks alone."""

from distlab.grading import expect_equal


def test_two_stages(impl, run):
    """One micro-batch over two stages gets its messages."""

    def body(ctx):
        step = impl.Step
        order = [[step("F", 0, 0), step("B", 0, 0)], [step("F", 1, 0), step("B", 1, 0)]]
        schedule = impl.with_messages(order)
        impl.validate(schedule, 2, 1)
        return [[each.kind for each in steps] for steps in schedule]

    want = [["F", "send F", "recv B", "B"], ["recv F", "F", "B", "send B"]]
    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, want, what="the steps", rank=rank)
