"""Embeddings and nearest neighbours, for skills and passages alike."""
