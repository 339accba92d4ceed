"""A player shows a recorded run step by step in a page: plain SVG, a little script, no network."""
