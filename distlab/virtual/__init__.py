"""Virtual ranks: the unchanged program on a virtual cluster, deterministic, under a virtual clock."""

from .cluster import Cluster, load_cluster
from .run import VirtualResults, run_virtual

__all__ = ["Cluster", "VirtualResults", "load_cluster", "run_virtual"]
