"""Phase 4: production (fault tolerance, compression, monitoring, the trainer, its deployment)."""
