"""Write the test: a learner's checks, tried on right and wrong implementations."""
