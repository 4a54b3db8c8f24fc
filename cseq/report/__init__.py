"""A page about a run, from its `Stats` alone. `import cseq` imports none of this."""
