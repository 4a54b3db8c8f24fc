"""Tools that show what a loader does. `import cseq` does not import them."""
