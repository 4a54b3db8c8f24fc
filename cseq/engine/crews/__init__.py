"""Who works on tickets: worker processes, threads, or the loop's own thread."""
