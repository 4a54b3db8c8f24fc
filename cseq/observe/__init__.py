"""Tools for inspecting loaders. `import cseq` does not import these tools."""
