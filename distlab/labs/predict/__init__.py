"""Predict a run, then run it: formula, ledger and virtual clock answer beside the learner."""
