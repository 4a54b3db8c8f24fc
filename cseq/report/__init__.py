"""Creates a page about a run from its `Stats`. Not imported by `import cseq`."""
