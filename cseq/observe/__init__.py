"""Tools for inspecting loaders. Not imported by `import cseq`."""
