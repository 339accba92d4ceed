"""The toolkit of the course: run ranks, record what they do, explain mistakes, grade."""
