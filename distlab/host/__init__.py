"""What this machine can do, and processes on it."""
