"""A class: its rules, its submissions, and what becomes of them."""
