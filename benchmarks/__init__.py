"""Speed of the toolkit and of the solutions, beside PyTorch's own: ``make bench``."""
