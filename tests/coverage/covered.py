"""Combines and reports what `make check-coverage` has measured, in the current folder.

Each process writes its own file. A killed process's file is incomplete and left out: it lacks
tables, or has lines of the core without the plugin that knows such lines.
"""

import io
from pathlib import Path

import coverage
from coverage.exceptions import DataError


def is_whole(file):
    """Return whether a process has written its file to the end."""
    data = coverage.CoverageData(str(file))
    try:
        data.read()
        return all(data.file_tracer(one) for one in data.measured_files() if one.endswith(".pyx"))
    except DataError:
        return False
    finally:
        data.close()


def main():
    """Print the lines that were missed, then the shares of Python and of Cython."""
    files = list(Path().glob(".coverage.*"))
    whole = [str(file) for file in files if is_whole(file)]
    measured = coverage.Coverage()
    measured.combine(whole, keep=True)
    measured.report(show_missing=True, skip_covered=True)
    print(f"{len(whole)} processes measured, {len(files) - len(whole)} were killed as they wrote")
    for name, pattern in (("Python", "*.py"), ("Cython", "*.pyx")):
        share = measured.report(include=[pattern], file=io.StringIO())
        print(f"{name}: {share:.1f} % of the lines")


if __name__ == "__main__":
    main()
