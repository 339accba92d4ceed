"""Find the bug: a program around a wrong implementation, a report, and what grades the answer."""
