"""Rows against weighted points of the model: what they are compared by, how gaps are completed, what is minimised."""
