"""Solutions of phase 3."""
