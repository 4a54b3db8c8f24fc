"""Crews work on tickets in processes, threads, or the training thread."""
