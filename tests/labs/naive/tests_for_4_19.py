"""Naive: one small trace alone."""

from distlab.grading import expect_equal
from given.profile_files import Span, Trace

HOST, STREAM = (1, 1), (0, 7)


def small():
    return Trace(
        (
            Span("step", "ProfilerStep#1", HOST, 0, 100, 0),
            Span("data", "loader", HOST, 0, 30, 0),
            Span("compute", "kernel", STREAM, 40, 100, 20),
        )
    )


def test_parts_of_a_step(impl, run):
    """A step that waits for its data, and then computes."""

    def body(ctx):
        return impl.parts(small())

    (found,) = run(body, 1)
    expect_equal(found["data"], 30, what="ns of data")
    expect_equal(found["compute"], 60, what="ns of compute")


def test_bottleneck_of_a_step(impl, run):
    """The loader has more than a tenth of the window."""

    def body(ctx):
        return impl.bottleneck(small()).part

    expect_equal(run(body, 1)[0], "data", what="the bottleneck")
