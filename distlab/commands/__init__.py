"""What ``distlab …`` does, one file per family of commands."""
