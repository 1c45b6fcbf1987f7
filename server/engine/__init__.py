"""The connector's two halves inside vLLM: the only importers of torch and vllm."""
