"""Code that is given: templates, solutions and the toolkit share it, and no learner writes it."""
