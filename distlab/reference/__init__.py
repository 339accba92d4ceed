"""The workloads that everybody trains, and recorded runs to compare with."""
