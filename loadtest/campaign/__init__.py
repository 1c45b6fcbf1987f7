"""The load test: systems in turn, under the same traffic, through what happens to a cache.

    python -m loadtest.campaign [--full]

`plan.py` says which systems, workloads and stages; `stages.py` what a stage is; `conduct.py` does
it; `results.py` keeps what came of it.
"""
