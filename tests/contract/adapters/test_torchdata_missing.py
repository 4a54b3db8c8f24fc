"""The import error without torchdata."""


def test_without_torchdata_the_import_says_what_to_install(run_prepared):
    done = run_prepared(
        "import sys\nsys.modules['torchdata'] = None\nimport cseq.adapters.torchdata\n"
    )
    assert done.returncode == 1
    assert "ImportError: cseq.adapters.torchdata needs torch and torchdata 0.9" in done.stderr
    assert "pip install 'cseq-loader[torchdata]'" in done.stderr
