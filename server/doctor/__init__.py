"""`kvtier doctor`: whether this host, its settings and a running server go together."""
