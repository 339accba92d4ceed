"""Phase 3: many nodes (ring and tree all-reduce, DDP, ZeRO, FSDP, parameter server, local SGD)."""
