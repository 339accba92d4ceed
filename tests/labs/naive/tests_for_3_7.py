"""Naive: values on two ranks alone."""

from distlab.grading import expect_equal


def test_two_nodes(impl, run):
    """Two ranks on two hosts."""

    def body(ctx):
        places = [impl.Place("a", 0, 0), impl.Place("b", 1, 0)]
        topology = impl.topology_of(places)
        return [list(map(list, topology.nodes)), list(topology.locate(1))]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [[[0], [1]], [1, 0]], what="the nodes", rank=rank)
