"""What everybody trains on, and recorded runs to compare with."""
