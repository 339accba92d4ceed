"""A cluster on one machine: real processes on nodes whose links have a chosen speed."""

from .launch import Run, run_cluster
from .network import ClusterUnavailable, Network, bytes_sent, cluster_obstacle

__all__ = ["ClusterUnavailable", "Network", "Run", "bytes_sent", "cluster_obstacle", "run_cluster"]
