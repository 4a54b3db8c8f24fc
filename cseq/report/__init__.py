"""Generates a page about a run from its `Stats`. `import cseq` does not import this package."""
