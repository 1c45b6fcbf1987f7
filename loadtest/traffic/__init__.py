"""A load generator for any server that speaks OpenAI's completions, with what it measured.

`workloads.py` and `traces.py` say what is asked, `runner.py` asks it, `sources.py` reads where the
cached tokens came from, `summary.py` and `compare.py` make figures of it, `plots.py` and `page.py`
show them. `python -m loadtest.traffic` does all of it against one server.
"""
