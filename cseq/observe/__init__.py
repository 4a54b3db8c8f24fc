"""Programs that show what a loader does. `import cseq` imports none of them."""
