"""Token pooling: fewer tokens for each document."""
