"""kvtier: a tiered KV cache server for vLLM.

The prefix blocks that an engine computed stream from its device (L0) into this server's host
memory (L1), keyed by vLLM's own block hashes, and come back to any engine whose request starts
with the same tokens.
"""

__version__ = "0.1.0"
