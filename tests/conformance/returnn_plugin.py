"""A pytest plugin: RETURNN's `MultiProcDataset` is ours, before any test imports it."""

from cseq.adapters.returnn import MultiProcDataset, install

install()


def pytest_report_header():
    """Say whose class is tested."""
    return f"MultiProcDataset: {MultiProcDataset.__module__}"
