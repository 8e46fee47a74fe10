"""Kinds of data: what a fit asks of tables, sequences, documents and images, one file for each."""
