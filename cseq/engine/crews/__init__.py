"""The runners of tickets: worker processes, threads, or the training thread."""
