"""Naive: values on two ranks alone."""

from distlab.grading import expect_equal


def test_two_ranks_share_an_epoch(impl, run):
    """Two ranks see every sample once."""

    def body(ctx):
        sampler = impl.ElasticSampler(8, global_batch_size=4, rank=ctx.rank, world_size=2)
        return [index for batch in sampler for index in batch]

    first, second = run(body, 2)
    expect_equal(sorted(first + second), list(range(8)), what="the samples")
