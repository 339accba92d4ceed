"""Clusters as data, and the cost of a backend's collectives on them; numbers with their sources."""

from .clusters import Cluster, load_cluster
from .collectives import collective_time

__all__ = ["Cluster", "collective_time", "load_cluster"]
