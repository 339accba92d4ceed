"""Virtual ranks: the unchanged program on a virtual cluster, under a virtual clock."""

from .cluster import Cluster, load_cluster
from .run import VirtualResults, reap_children, run_virtual, run_worlds

__all__ = [
    "Cluster",
    "VirtualResults",
    "load_cluster",
    "reap_children",
    "run_virtual",
    "run_worlds",
]
