"""What `lmcache_adapter.py` is made of."""
