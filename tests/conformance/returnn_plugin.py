"""A pytest plugin that makes RETURNN's `MultiProcDataset` cseq's, before any test imports it."""

from cseq.adapters.returnn import MultiProcDataset, install

install()


def pytest_report_header():
    return f"MultiProcDataset: {MultiProcDataset.__module__}"
