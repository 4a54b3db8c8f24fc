"""A pytest plugin: RETURNN's `MultiProcDataset` is ours, before any test imports it."""

from __future__ import annotations

from cseq.adapters.returnn import MultiProcDataset, install

install()


def pytest_report_header() -> str:
    """Say whose class is tested."""
    return f"MultiProcDataset: {MultiProcDataset.__module__}"
