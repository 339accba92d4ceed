"""Virtual ranks: the unchanged program on a virtual cluster, under a virtual clock."""

from ..hardware.clusters import Cluster, load_cluster
from .reports import VirtualResults
from .run import reap_children, run_virtual, run_worlds

__all__ = [
    "Cluster",
    "VirtualResults",
    "load_cluster",
    "reap_children",
    "run_virtual",
    "run_worlds",
]
