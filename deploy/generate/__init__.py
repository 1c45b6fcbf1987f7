"""What of the deployment files is made from something else, so that nothing is written twice.

    python -m deploy.generate            write the files
    python -m deploy.generate --check    say which would change, and fail if any would

`dashboards/` says what the dashboards show, and `catalog.py` which series there are: an expression
with another series, label or value stops the run. Nothing here is part of the package.
"""
