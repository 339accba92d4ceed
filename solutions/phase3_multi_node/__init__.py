"""Solutions of phase 3: multi-node training."""
