"""Labs: find the bug, write the test, predict the run, review a change."""
