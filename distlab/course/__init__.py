"""The map of the course, the learner's files, and what has passed."""
