"""Code that is given: a learner's file and a solution import it alike, and nobody writes it."""
