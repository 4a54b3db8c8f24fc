"""Crews process tickets in processes, in threads, or in the training thread."""
