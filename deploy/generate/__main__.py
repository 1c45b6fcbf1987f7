"""`python -m deploy.generate [--check]`."""

from __future__ import annotations

import argparse
import sys

from .files import made, stale


def main() -> int:
    """Write the files, or say which are stale; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if files differ")
    chosen = parser.parse_args()
    files = made()
    old = stale(files)
    for path in old:
        print(path)  # noqa: T201  # which files is what a caller wants to know
        if not chosen.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], "utf-8")
    return 1 if old and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
