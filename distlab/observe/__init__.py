"""What one rank did and held: communication, compute, memory, the learner's line."""
