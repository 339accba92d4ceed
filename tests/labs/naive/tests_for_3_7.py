"""Naive: values on two ranks alone."""

import torch.distributed as dist

from distlab.grading import expect_equal


def test_two_nodes(impl, run):
    """Two ranks on two hosts."""

    def body(ctx):
        places = [impl.Place("a", 0, 0), impl.Place("b", 1, 0)]
        topology = impl.topology_of(places)
        return [list(map(list, topology.nodes)), list(topology.locate(1))]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [[[0], [1]], [1, 0]], what="the nodes", rank=rank)


def test_two_ranks_of_a_node_share_a_group(impl, run):
    """Both ranks are in the node's group."""

    def body(ctx):
        groups = impl.make_groups(impl.Topology(nodes=((0, 1),)))
        return dist.get_world_size(groups.node)

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, 2, what="the ranks of the node", rank=rank)
