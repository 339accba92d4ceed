"""Code that templates, solutions and the toolkit share: given, not to be written by the learner."""
