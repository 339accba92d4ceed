"""Naive: values on two ranks alone."""

from distlab.grading import expect_equal


def test_two_ranks_share_an_epoch(impl, run):
    """Two ranks see every sample once."""

    def body(ctx):
        sampler = impl.ElasticSampler(8, global_batch_size=4, rank=ctx.rank, world_size=2)
        return [index for batch in sampler for index in batch]

    first, second = run(body, 2)
    expect_equal(sorted(first + second), list(range(8)), what="the samples")


def test_lengths_and_weights_of_two(impl, run):
    """Eight samples are two batches, and half a batch weighs a half."""

    def body(ctx):
        sampler = impl.ElasticSampler(8, global_batch_size=4, rank=ctx.rank, world_size=2)
        return [len(sampler), sampler.size_of(0), impl.loss_weight(2, 4, 2)]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [2, 4, 1.0], what="batches, samples, weight", rank=rank)
