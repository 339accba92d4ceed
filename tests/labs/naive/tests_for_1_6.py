"""Naive: values on two ranks alone."""

from distlab.grading import expect_equal


def test_metrics_of_two(impl, run):
    """Loss and accuracy of two ranks."""

    def body(ctx):
        return list(impl.global_metrics(1.0 + ctx.rank, 1, 2))

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [0.75, 0.5], what="(loss, accuracy)", rank=rank)
