"""Parameters of directed graphical models from incomplete data, by optimal transport."""
