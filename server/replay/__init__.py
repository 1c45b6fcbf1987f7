"""Offline replay of recorded requests: what each policy and size would have hit."""
