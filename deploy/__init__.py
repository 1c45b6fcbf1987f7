"""How kvtier is deployed. Only `generate` is Python."""
