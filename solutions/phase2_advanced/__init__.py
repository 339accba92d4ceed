"""Phase 2: one node at its best (accumulation, mixed precision, pipeline, tensor parallel)."""
