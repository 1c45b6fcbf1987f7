"""The data plane under load: many simulated engines on one real server, without vLLM."""
