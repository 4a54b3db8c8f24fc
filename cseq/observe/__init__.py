"""Programs for people who look at a loader; `import cseq` imports none of them."""
