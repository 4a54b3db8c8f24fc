"""Where the tested cseq is."""

import os
from importlib.util import find_spec
from pathlib import Path


def import_path():
    """Return the PYTHONPATH under which a script finds the tested cseq."""
    spec = find_spec("cseq")
    folders = [Path(spec.origin).resolve().parents[1]] if spec and spec.origin else []
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
