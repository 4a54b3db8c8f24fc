"""The import errors of adapters without their libraries."""

import re

import pytest

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "{0}":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Without())
import cseq.adapters.{0}
"""
SAID = {
    "returnn": r"pip install 'cseq-loader\[returnn\]'",
    "torchdata": r"ImportError: cseq.adapters.torchdata needs torch and torchdata 0\.9"
    r".*pip install 'cseq-loader\[torchdata\]'",
    "torchtitan": "ImportError: this adapter needs torchtitan; install it with: pip",
}


@pytest.mark.parametrize("library", SAID)
def test_the_import_says_what_to_install(run_prepared, library):
    done = run_prepared(WITHOUT.format(library))
    assert done.returncode == 1
    assert re.search(SAID[library], done.stderr)
