"""Records of one rank: its communication, compute, memory, and the learner's line."""
