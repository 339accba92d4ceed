"""The commands of ``distlab``, one file per family of commands."""
