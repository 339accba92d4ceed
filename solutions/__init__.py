"""Complete solutions of all exercises; importable and runnable."""
