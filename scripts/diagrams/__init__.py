"""The guidelines' diagrams: small SVGs, drawn by code from one specification per exercise."""

from . import (
    phase1,
    phase2_batches,
    phase2_pipelines,
    phase2_precision,
    phase2_tensors,
    phase3_memory,
    phase3_nodes,
    phase3_rings,
    phase3_servers,
    phase3_sharding,
    phase3_state,
    phase4_checkpoints,
    phase4_compression,
    phase4_faults,
    phase4_monitoring,
)
from .registry import DRAWINGS, FOLDER, ROOT, Placed, draw, placed

__all__ = [
    "DRAWINGS",
    "FOLDER",
    "ROOT",
    "Placed",
    "draw",
    "phase1",
    "phase2_batches",
    "phase2_pipelines",
    "phase2_precision",
    "phase2_tensors",
    "phase3_memory",
    "phase3_nodes",
    "phase3_rings",
    "phase3_servers",
    "phase3_sharding",
    "phase3_state",
    "phase4_checkpoints",
    "phase4_compression",
    "phase4_faults",
    "phase4_monitoring",
    "placed",
]
