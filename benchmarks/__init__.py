"""Speed of the toolkit and of the solutions, beside what PyTorch itself does: ``make bench``."""
