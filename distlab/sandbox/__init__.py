"""Ranks of code that nobody trusts: the same runs, in namespaces that hold no answers."""
